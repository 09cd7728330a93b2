//! Every file of a data directory, damaged in every way, one at a time: the daemon starts, says what it
//! found, keeps the rest, and loses nothing.
//!
//! The files are those that a walk through the folder finds, so a new kind of file is tested once `folder`
//! makes one, which `a_folder_has_every_kind_of_file` asks for. Folders of earlier formats are in
//! `tests/folders`.

mod cases;
mod earlier;
mod files;
mod folder;
mod read_only;

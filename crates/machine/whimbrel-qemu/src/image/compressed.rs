//! Images that are compressed as a whole, as many are published: decompressed by a program of the caller,
//! confined.

use super::{
    ImageError,
    confined_tool::{ConfinedTool, Run, patience_for},
    conversion::DISK_MAX,
};
use std::{fs::File, path::Path};

/// Bytes of an image for each that it has compressed, for the time that it may take; where there are more,
/// most are zeros.
const RATIO: u64 = 64;

/// The image in `compressed`, as `program` writes it into the file `name` of the directory `dir`, which
/// becomes that of the program. It has these arguments, reads its standard input, and writes at most 16 TiB.
pub fn decompressed(
    dir: &Path,
    (program, arguments): (&Path, Vec<String>),
    (compressed, name): (File, &str),
    cancelled: &dyn Fn() -> bool,
) -> Result<File, ImageError> {
    let length = compressed.metadata().map_err(ImageError::Read)?.len();
    let tool = ConfinedTool::new(dir, DISK_MAX)?;
    let patience = patience_for(length.saturating_mul(RATIO));
    tool.unpack(Run { program, arguments, input: Some(compressed), patience }, cancelled)?;
    tool.open_made(name)
}

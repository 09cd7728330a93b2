//! Symbols for listing folders.

use super::{is_simulated, place, result};
use crate::{
    raw,
    world::{files, is_inside, with},
};
use libc::{DIR, dirent64};
use std::{
    collections::BTreeSet,
    ffi::{c_char, c_int},
    sync::{Mutex, PoisonError},
};

/// Listing of a simulated folder.
struct Listing {
    fd: c_int,
    entries: std::vec::IntoIter<(String, u64, bool)>,
    entry: dirent64,
}

/// Addresses of the listings that are open.
static OPEN: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

fn is_listing(folder: *mut DIR) -> bool {
    is_inside() && with(|_| OPEN.lock().unwrap_or_else(PoisonError::into_inner).contains(&(folder as usize)))
}

fn list(fd: c_int) -> *mut DIR {
    match files::list(fd) {
        Ok(entries) => {
            // SAFETY: any bytes are a valid entry.
            let entry = unsafe { std::mem::zeroed() };
            let listing = Box::into_raw(Box::new(Listing { fd, entries: entries.into_iter(), entry }));
            with(|_| OPEN.lock().unwrap_or_else(PoisonError::into_inner).insert(listing as usize));
            listing.cast()
        }
        Err(error) => {
            result::<isize>(Err(error));
            std::ptr::null_mut()
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn opendir(path: *const c_char) -> *mut DIR {
    // SAFETY: opendir(3) demands a string that ends in zero.
    let Some(place) = (unsafe { place(-1, path) }) else {
        // SAFETY: this is the type that opendir(3) documents.
        let real: unsafe extern "C" fn(*const c_char) -> *mut DIR = unsafe { raw::next(c"opendir") };
        // SAFETY: the argument is the caller's own.
        return unsafe { real(path) };
    };
    match files::open(&place, libc::O_DIRECTORY) {
        Ok(fd) => {
            let listing = list(fd);
            if listing.is_null() {
                files::close(fd);
            }
            listing
        }
        Err(error) => {
            result::<isize>(Err(error));
            std::ptr::null_mut()
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fdopendir(fd: c_int) -> *mut DIR {
    if is_simulated(fd) {
        return list(fd);
    }
    // SAFETY: this is the type that fdopendir(3) documents.
    let real: unsafe extern "C" fn(c_int) -> *mut DIR = unsafe { raw::next(c"fdopendir") };
    // SAFETY: the argument is the caller's own.
    unsafe { real(fd) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn readdir64(folder: *mut DIR) -> *mut dirent64 {
    if !is_listing(folder) {
        // SAFETY: this is the type that readdir(3) documents.
        let real: unsafe extern "C" fn(*mut DIR) -> *mut dirent64 = unsafe { raw::next(c"readdir64") };
        // SAFETY: the argument is the caller's own.
        return unsafe { real(folder) };
    }
    // SAFETY: `list` has made it, and readdir(3) leaves it to the caller not to use it twice at once.
    let listing = unsafe { &mut *folder.cast::<Listing>() };
    let Some((name, inode, is_folder)) = listing.entries.next() else { return std::ptr::null_mut() };
    let entry = &mut listing.entry;
    (entry.d_ino, entry.d_reclen) = (inode, size_of::<dirent64>() as u16);
    entry.d_type = if is_folder { libc::DT_DIR } else { libc::DT_REG };
    let bytes = name.bytes().chain([0]);
    entry.d_name.iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte as c_char);
    entry
}

#[unsafe(no_mangle)]
unsafe extern "C" fn closedir(folder: *mut DIR) -> c_int {
    if !is_listing(folder) {
        // SAFETY: this is the type that closedir(3) documents.
        let real: unsafe extern "C" fn(*mut DIR) -> c_int = unsafe { raw::next(c"closedir") };
        // SAFETY: the argument is the caller's own.
        return unsafe { real(folder) };
    }
    with(|_| OPEN.lock().unwrap_or_else(PoisonError::into_inner).remove(&(folder as usize)));
    // SAFETY: `list` has made it, and it was open until now.
    let listing = unsafe { Box::from_raw(folder.cast::<Listing>()) };
    files::close(listing.fd);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dirfd(folder: *mut DIR) -> c_int {
    if is_listing(folder) {
        // SAFETY: `list` has made it, and it is open.
        return unsafe { (*folder.cast::<Listing>()).fd };
    }
    // SAFETY: this is the type that dirfd(3) documents.
    let real: unsafe extern "C" fn(*mut DIR) -> c_int = unsafe { raw::next(c"dirfd") };
    // SAFETY: the argument is the caller's own.
    unsafe { real(folder) }
}

//! Compression of layers and of disk images, recognised by the first bytes.

use rustix::fs::fstatvfs;
use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    os::unix::fs::FileExt,
    path::Path,
};

const GZIP: &[u8] = &[0x1f, 0x8b];
const XZ: &[u8] = b"\xfd7zXZ\0";
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
/// Bytes that become a hole if they are zeros.
const BLOCK: usize = 64 << 10;
/// Blocks after which it is looked how much room is left.
const LOOK_EVERY: u64 = 1024;
/// Room that stays on the disk for everybody else, in bytes.
const ROOM: u64 = 256 << 20;

/// What is read without its compression, whichever it has.
pub(crate) fn decompressed<'a>(packed: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut packed = BufReader::with_capacity(1 << 16, packed);
    let start = packed.fill_buf()?;
    Ok(match () {
        () if start.starts_with(GZIP) => Box::new(flate2::bufread::MultiGzDecoder::new(packed)),
        () if start.starts_with(XZ) => Box::new(lzma_rust2::XzReader::new(packed, true)),
        () if start.starts_with(ZSTD) => Box::new(zstd::Decoder::with_buffer(packed)?),
        () => Box::new(packed),
    })
}

/// Writes the disk image in `packed` into the new file `place`, with holes for zeros, and returns its length
/// in bytes. Fails before the disk is full.
pub fn decompress_disk(packed: impl Read, place: &Path) -> io::Result<u64> {
    let (mut image, disk) = (decompressed(packed)?, File::create_new(place)?);
    let (mut block, mut length) = (vec![0; BLOCK], 0);
    for number in 0_u64.. {
        if number.is_multiple_of(LOOK_EVERY) {
            let space = fstatvfs(&disk)?;
            if space.f_bavail.saturating_mul(space.f_frsize) < ROOM {
                return Err(io::Error::new(
                    io::ErrorKind::StorageFull,
                    "the disk of this host would be full",
                ));
            }
        }
        let count = filled(&mut image, &mut block)?;
        if block[..count].iter().any(|byte| *byte != 0) {
            disk.write_all_at(&block[..count], length)?;
        }
        length += count as u64;
        if count < BLOCK {
            break;
        }
    }
    disk.set_len(length)?;
    Ok(length)
}

/// Reads until the buffer is full or nothing is left.
fn filled(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut count = 0;
    while count < buffer.len() {
        match from.read(&mut buffer[count..]) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::Write,
        os::unix::fs::MetadataExt,
        process::{Command, Stdio},
    };

    fn packed(program: &str, content: &[u8]) -> Vec<u8> {
        let mut child =
            Command::new(program).arg("-c").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        let content = content.to_vec();
        let writer = std::thread::spawn(move || input.write_all(&content).unwrap());
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        assert!(output.status.success(), "{program}");
        output.stdout
    }

    #[test]
    fn a_disk_comes_out_of_every_compression_with_holes_for_its_zeros() {
        let mut content = vec![0; 8 << 20];
        content[5 << 20..][..70_000].fill(7);
        content.extend([1, 2, 3]);
        let dir = tempfile::tempdir().unwrap();
        for program in ["gzip", "xz", "zstd", "cat"] {
            let input = if program == "cat" { content.clone() } else { packed(program, &content) };
            let place = dir.path().join(program);
            // Several packed parts one after another are one image.
            let twice = [&input[..], &input[..]].concat();
            assert_eq!(decompress_disk(&twice[..], &place).unwrap(), 2 * content.len() as u64, "{program}");
            assert!(std::fs::read(&place).unwrap() == [&content[..], &content[..]].concat(), "{program}");
            assert!(std::fs::metadata(&place).unwrap().blocks() * 512 < 1 << 20, "{program}: no holes");
            decompress_disk(&input[..], &place).unwrap_err();
            if program != "cat" {
                let cut = dir.path().join("cut");
                decompress_disk(&input[..input.len() / 2], &cut).unwrap_err();
                std::fs::remove_file(&cut).unwrap();
            }
        }
    }
}

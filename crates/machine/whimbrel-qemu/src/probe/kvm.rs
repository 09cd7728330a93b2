//! KVM probe: tests whether KVM executes guests. The device file alone proves nothing: inside some virtual
//! machines it exists, opens, and emulates every instruction at a thousandth of the speed. So a tiny guest
//! must finish some work in time.

use super::{QemuBinary, kvm_result};
use std::{
    fs::OpenOptions,
    io::{self, Write},
    os::fd::AsRawFd,
    path::Path,
    process::{Command, Stdio},
    sync::OnceLock,
    time::Duration,
};

/// Start of the guest's countdown: 10 ms on a processor, a minute if each instruction is emulated.
const COUNT: u32 = 20_000_000;
/// Time limit of the guest, including QEMU's start.
const TIME_LIMIT: Duration = Duration::from_secs(4);
/// Exit status of `timeout` for a command that it has killed.
const KILLED: i32 = 137;
/// Value that the guest writes to the exit device.
const DONE: u8 = 0x2a;
/// Exit status of QEMU for that value.
const EXIT_STATUS: i32 = (DONE as i32) << 1 | 1;
/// QEMU accepts firmware in units of 64 KiB.
const FIRMWARE_SIZE: usize = 64 << 10;

/// Result of the probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvmProbe {
    /// Guests run on KVM.
    Works,
    /// The device `/dev/kvm` does not exist.
    Absent,
    /// Opening the device is not permitted.
    Denied,
    /// The device exists but does not work.
    Broken {
        /// Error of QEMU, or the exceeded time limit.
        words: String,
    },
}

/// Probes KVM on the first call: takes at most 4 s, and if it does not work only once a boot.
pub fn probe_kvm(binary: &QemuBinary) -> &'static KvmProbe {
    static FOUND: OnceLock<KvmProbe> = OnceLock::new();
    FOUND.get_or_init(|| match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => KvmProbe::Denied,
        Err(_) => KvmProbe::Absent,
        Ok(_) => try_kvm(&binary.path),
    })
}

fn try_kvm(qemu: &Path) -> KvmProbe {
    if let Some(words) = kvm_result::load(qemu) {
        return KvmProbe::Broken { words };
    }
    match run_guest(qemu, "kvm", TIME_LIMIT) {
        Ok(()) => KvmProbe::Works,
        Err(words) => {
            if let Err(error) = kvm_result::save(qemu, &words) {
                tracing::debug!(%error, "cannot save the result of the KVM probe");
            }
            KvmProbe::Broken { words }
        }
    }
}

/// Runs the tiny guest; returns the reason if it does not finish.
fn run_guest(qemu: &Path, accel: &str, patience: Duration) -> Result<(), String> {
    let failed = |error: io::Error| error.to_string();
    // The file has no name, so that nothing is left in any case.
    let mut firmware = tempfile::tempfile().map_err(failed)?;
    firmware.write_all(&firmware_image()).map_err(failed)?;
    let firmware_path = format!("/proc/{}/fd/{}", std::process::id(), firmware.as_raw_fd());
    let mut words = tempfile::tempfile().map_err(failed)?;
    // `timeout` ends it even if this process is killed meanwhile; a guest that never finishes would occupy a
    // processor for ever.
    let status = Command::new("timeout")
        .args(["--signal=KILL", &format!("{:.3}", patience.as_secs_f64().max(0.001))])
        .arg(qemu)
        .args(["-accel", accel, "-machine", "q35", "-m", "16", "-nodefaults", "-no-user-config"])
        .args(["-display", "none", "-vga", "none", "-device", "isa-debug-exit,iobase=0xf4,iosize=1", "-bios"])
        .arg(firmware_path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(words.try_clone().map_err(failed)?)
        .status()
        .map_err(failed)?;
    match status.code() {
        Some(EXIT_STATUS) => Ok(()),
        // The signal reaches `timeout` too, so either may be reported.
        None | Some(KILLED) => Err(format!("a guest that needs 10 ms did not finish within {patience:?}")),
        Some(_) => Err(last_line(&mut words)),
    }
}

fn last_line(words: &mut std::fs::File) -> String {
    use std::io::{Read, Seek};
    let mut text = String::new();
    let read = words.rewind().and_then(|()| words.take(64 << 10).read_to_string(&mut text));
    match (read, text.trim().lines().last()) {
        (Ok(_), Some(line)) => line.to_owned(),
        _ => "qemu ended without output".to_owned(),
    }
}

/// Firmware that counts down and exits. A processor starts 16 bytes before its end, in real mode.
fn firmware_image() -> Vec<u8> {
    const ENTRY: usize = FIRMWARE_SIZE - 16;
    const CODE: usize = 0xff00;
    let mut image = vec![0xf4; FIRMWARE_SIZE];
    // Near jump to CODE, relative to the next instruction.
    let offset = (CODE as i32 - (ENTRY as i32 + 3)) as i16;
    image[ENTRY] = 0xe9;
    image[ENTRY + 1..ENTRY + 3].copy_from_slice(&offset.to_le_bytes());
    let mut code = vec![0x66, 0xb9]; // mov ecx, COUNT
    code.extend(COUNT.to_le_bytes());
    code.extend([0x66, 0x49]); // again: dec ecx
    code.extend([0x75, 0xfc]); // jnz again
    code.extend([0xb0, DONE, 0xe6, 0xf4]); // mov al, DONE; out 0xf4, al
    code.extend([0xf4, 0xeb, 0xfd]); // hlt, for ever
    image[CODE..CODE + code.len()].copy_from_slice(&code);
    image
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::find;

    #[test]
    fn the_tiny_guest_ends_where_guests_can_run() {
        run_guest(&find().unwrap(), "tcg", Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn a_guest_that_gets_nowhere_ends_the_attempt_in_time() {
        let failed = run_guest(&find().unwrap(), "tcg", Duration::ZERO).unwrap_err();
        assert!(failed.contains("did not finish"), "{failed}");
        let failed = run_guest(&find().unwrap(), "nonsense", Duration::from_secs(60)).unwrap_err();
        assert!(failed.contains("nonsense"), "{failed}");
    }
}

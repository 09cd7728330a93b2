//! KVM probe: tests whether KVM executes guests. The device file alone proves nothing: inside some virtual
//! machines it exists, opens, lacks instructions and emulates the others at a thousandth of the speed. So a
//! tiny guest tries what a kernel of today needs, and must finish some work in time.
//!
//! The guest is `firmware.s`, assembled: the tests compare the two.

use super::{QemuBinary, kvm_result};
use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::Path,
    process::{Command, Stdio},
    sync::OnceLock,
    time::Duration,
};

/// Time limit of one run of the guest, including QEMU's start. It needs 10 ms on a processor, and a minute if
/// each instruction is emulated.
const TIME_LIMIT: Duration = Duration::from_secs(4);
/// Exit status of `timeout` for a command that it has killed.
const KILLED: i32 = 137;
/// Value that the guest writes to the exit device.
const DONE: u8 = 0x2a;
/// Exit status of QEMU for that value.
const EXIT_STATUS: i32 = (DONE as i32) << 1 | 1;
/// QEMU accepts firmware in units of 64 KiB. A processor starts 16 bytes before its end.
const FIRMWARE_SIZE: usize = 64 << 10;
/// The code, for the end of the firmware.
pub(super) const CODE: &[u8] = include_bytes!("firmware.bin");
/// Byte of the code with a bit for each step to leave out.
const SKIP: usize = 0x3ff;
/// Steps that can be left out, in the order of their bits: letter on the debug console, and what they try.
const STEPS: [(u8, &str); 5] = [
    (b'f', "FXSAVE"),
    (b'b', "INT3"),
    (b'c', "CMPXCHG16B"),
    (b'x', "XSAVE"),
    (b'u', "SYSCALL from user mode"),
];
/// Letter of the last step, which counts.
const SPEED: u8 = b's';

/// Result of the probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvmProbe {
    /// Guests run on KVM.
    Works,
    /// The device `/dev/kvm` does not exist.
    Absent,
    /// Opening the device is not permitted.
    Denied,
    /// Only this process may open the device, and not the users of machines.
    Closed,
    /// The device exists but does not work.
    Broken {
        /// Error of QEMU, or the exceeded time limit.
        words: String,
    },
}

/// Run of the guest that did not finish.
struct Unfinished {
    /// Letter of the step that it was at; none if it did not begin.
    step: Option<u8>,
    words: String,
}

/// Probes KVM on the first call. If it does not work that takes some seconds for each thing that it lacks,
/// but only once a boot.
pub fn probe_kvm(binary: &QemuBinary) -> &'static KvmProbe {
    static FOUND: OnceLock<KvmProbe> = OnceLock::new();
    FOUND.get_or_init(|| match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => KvmProbe::Denied,
        Err(_) => KvmProbe::Absent,
        Ok(device) if !is_open_to_machines(&device) => KvmProbe::Closed,
        Ok(_) => try_kvm(&binary.path),
    })
}

/// Whether the user of a machine may open the device: it has the device's group, unless that is root's.
fn is_open_to_machines(device: &File) -> bool {
    let open = |gid: u32, mode: u32| mode & 0o006 == 0o006 || (gid != 0 && mode & 0o060 == 0o060);
    device.metadata().is_ok_and(|meta| open(meta.gid(), meta.mode()))
}

fn try_kvm(qemu: &Path) -> KvmProbe {
    if let Some(words) = kvm_result::load(qemu) {
        return KvmProbe::Broken { words };
    }
    match find_lacking(qemu, "kvm", TIME_LIMIT) {
        Ok(()) => KvmProbe::Works,
        Err(words) => {
            if let Err(error) = kvm_result::save(qemu, &words) {
                tracing::debug!(%error, "cannot save the result of the KVM probe");
            }
            KvmProbe::Broken { words }
        }
    }
}

/// Runs the guest again and again, each time without the steps that did not work before; returns all that is
/// lacking.
fn find_lacking(qemu: &Path, accel: &str, patience: Duration) -> Result<(), String> {
    let (mut cpu, mut skip, mut lacking) = ("max", 0, Vec::new());
    while let Err(Unfinished { step, words }) = run_guest((qemu, accel, cpu), skip, patience) {
        let known = STEPS.iter().position(|(letter, _)| Some(*letter) == step);
        match (step, known) {
            (None, _) if cpu == "max" => {
                lacking.push(format!("the CPU model `max` ({words})"));
                cpu = "qemu64";
                continue;
            }
            (_, Some(bit)) if skip & (1 << bit) == 0 => {
                lacking.push(STEPS[bit].1.to_owned());
                skip |= 1 << bit;
                continue;
            }
            (Some(SPEED), _) => lacking.push(format!("speed ({words})")),
            (Some(_), _) => lacking.push(format!("64-bit mode ({words})")),
            (None, _) => return Err(words),
        }
        break;
    }
    if lacking.is_empty() { Ok(()) } else { Err(format!("it lacks {}", lacking.join(", "))) }
}

/// Runs the guest once, without the steps whose bits are in `skip`.
fn run_guest(
    (qemu, accel, cpu): (&Path, &str, &str),
    skip: u8,
    patience: Duration,
) -> Result<(), Unfinished> {
    let failed = |error: io::Error| Unfinished { step: None, words: error.to_string() };
    // The files have no names, so that nothing is left in any case.
    let mut firmware = tempfile::tempfile().map_err(failed)?;
    firmware.write_all(&firmware_image(skip)).map_err(failed)?;
    let (console, words) = (tempfile::tempfile().map_err(failed)?, tempfile::tempfile().map_err(failed)?);
    let path = |file: &File| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    // `timeout` ends it even if this process is killed meanwhile; a guest that never finishes would occupy a
    // processor for ever.
    let status = Command::new("timeout")
        .args(["--signal=KILL", &format!("{:.3}", patience.as_secs_f64().max(0.001))])
        .arg(qemu)
        .args(["-accel", accel, "-cpu", cpu, "-machine", "q35", "-m", "16", "-nodefaults", "-no-user-config"])
        .args(["-no-reboot", "-display", "none", "-vga", "none"])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=1"])
        .args(["-chardev", &format!("file,id=steps,path={}", path(&console))])
        .args(["-device", "isa-debugcon,iobase=0x402,chardev=steps", "-bios", &path(&firmware)])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(words.try_clone().map_err(failed)?)
        .status()
        .map_err(failed)?;
    let words = match status.code() {
        Some(EXIT_STATUS) => return Ok(()),
        // The signal reaches `timeout` too, so either may be reported.
        None | Some(KILLED) => format!("a guest that needs 10 ms did not finish within {patience:?}"),
        Some(_) => last_line(words).unwrap_or_else(|| "qemu ended without output".to_owned()),
    };
    Err(Unfinished { step: text(console).bytes().last(), words })
}

fn last_line(words: File) -> Option<String> {
    text(words).trim().lines().last().map(str::to_owned)
}

/// Content of a file of QEMU, as far as it can be read.
fn text(mut file: File) -> String {
    let mut text = Vec::new();
    let read = file.rewind().and_then(|()| file.take(64 << 10).read_to_end(&mut text));
    read.map(|_| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default()
}

fn firmware_image(skip: u8) -> Vec<u8> {
    let mut image = vec![0xf4; FIRMWARE_SIZE - CODE.len()];
    image.extend(CODE);
    image[FIRMWARE_SIZE - CODE.len() + SKIP] = skip;
    image
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::find;
    use std::fs;

    #[test]
    fn the_tiny_guest_ends_where_guests_can_run() {
        let qemu = find().unwrap();
        find_lacking(&qemu, "tcg", Duration::from_secs(60)).unwrap();
        let skipping = run_guest((&qemu, "tcg", "qemu64"), 0b1_1111, Duration::from_secs(60));
        assert!(skipping.is_ok());
    }

    #[test]
    fn a_guest_that_gets_nowhere_ends_the_attempt_in_time() {
        let failed = find_lacking(&find().unwrap(), "tcg", Duration::ZERO).unwrap_err();
        assert!(failed.contains("did not finish"), "{failed}");
        let failed = find_lacking(&find().unwrap(), "nonsense", Duration::from_secs(60)).unwrap_err();
        assert!(failed.contains("nonsense"), "{failed}");
    }

    /// An old processor stands for a KVM without the instruction; the rest is found all the same.
    #[test]
    fn the_step_that_does_not_work_is_named() {
        let run = run_guest((&find().unwrap(), "tcg", "qemu64,-fxsr,-sse,-sse2"), 0, Duration::from_secs(60));
        let unfinished = run.unwrap_err();
        assert_eq!(unfinished.step, Some(b'f'), "{}", unfinished.words);
    }

    #[test]
    fn the_firmware_is_what_its_source_assembles_to() {
        let folder = tempfile::tempdir().unwrap();
        let (object, binary) = (folder.path().join("o"), folder.path().join("bin"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/probe/firmware.s");
        let ran = |command: &mut Command| assert!(command.status().unwrap().success(), "{command:?}");
        ran(Command::new("as").arg("-o").arg(&object).arg(source));
        ran(Command::new("ld").args(["-Ttext=0xf000", "--oformat=binary", "-o"]).arg(&binary).arg(&object));
        assert!(fs::read(binary).unwrap() == CODE, "assemble it again, as its first lines say");
    }
}

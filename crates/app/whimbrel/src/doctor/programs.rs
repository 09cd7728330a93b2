//! Checks of programs: QEMU, KVM, firmware, TPM, network tools and the daemon.

use super::{Check, CheckStatus};
use std::{
    env, fs,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
};
use whimbrel_container::{GuestPrograms, Kernel};
use whimbrel_qemu::{KvmProbe, QemuBinary, Tpm};

/// Oldest QEMU with `-netdev stream`.
const QEMU_MIN: (u64, u64) = (7, 2);

/// Checks QEMU and, if it is installed, KVM.
pub(super) fn qemu() -> Vec<Check> {
    let install = "install QEMU 7.2 or newer, on Debian: apt install qemu-system-x86";
    match whimbrel_qemu::probe() {
        Err(error) => vec![Check::bad("qemu", CheckStatus::Fail, error.to_string(), install)],
        Ok(binary) => {
            let found = format!("{} at {}", binary.version, binary.path.display());
            let recent = (binary.version.major, binary.version.minor) >= QEMU_MIN;
            let check = if recent {
                Check::ok("qemu", found)
            } else {
                Check::bad("qemu", CheckStatus::Fail, found, install)
            };
            vec![check, kvm(binary)]
        }
    }
}

/// Runs a guest under KVM, because nested virtualisation may fail although /dev/kvm opens.
fn kvm(binary: &QemuBinary) -> Check {
    let slow =
        |found: String, fix| Check::bad("kvm", CheckStatus::Warn, format!("{found}; guests run on tcg"), fix);
    match whimbrel_qemu::probe_kvm(binary) {
        KvmProbe::Works => Check::ok("kvm", "executes guests"),
        KvmProbe::Absent => slow(
            "no /dev/kvm".to_owned(),
            "turn virtualisation on in the firmware, load kvm_intel or kvm_amd",
        ),
        KvmProbe::Denied => {
            slow("no permission to open /dev/kvm".to_owned(), "run as root or join the group kvm")
        }
        KvmProbe::Closed => slow(
            "/dev/kvm is closed to the users of machines".to_owned(),
            "give it a group other than root's, as udev does: chgrp kvm /dev/kvm; chmod 660 /dev/kvm",
        ),
        KvmProbe::Broken { words } => slow(
            format!("runs no kernel of today: {words}"),
            "turn on nested virtualisation on the host of this machine; guests that need less run with --accel kvm",
        ),
    }
}

/// Checks the programs that managed networks are made with.
pub(super) fn network_tools() -> Check {
    let missing: Vec<&str> =
        ["ip", "nft", "dnsmasq"].into_iter().filter(|program| find(program).is_none()).collect();
    if missing.is_empty() {
        return Check::ok("network tools", "ip, nft and dnsmasq");
    }
    let fix = "apt install iproute2 nftables dnsmasq-base: `whimbrel network create` needs them";
    Check::bad("network tools", CheckStatus::Warn, format!("no program {} in PATH", missing.join(", ")), fix)
}

/// Checks the firmware of machines with UEFI.
pub(super) fn uefi() -> Check {
    let found =
        whimbrel_qemu::uefi_files(false).and_then(|plain| Ok((plain, whimbrel_qemu::uefi_files(true)?)));
    match found {
        Ok((plain, secure)) => {
            let detail = format!("{}, {} with Secure Boot", plain.code.display(), secure.code.display());
            Check::ok("uefi", detail)
        }
        Err(error) => {
            let fix = "apt install ovmf: machines with --profile uefi and desktop need it";
            Check::bad("uefi", CheckStatus::Warn, error.to_string(), fix)
        }
    }
}

/// Checks the program that is the TPM of machines.
pub(super) fn tpm() -> Check {
    match Tpm::find() {
        Ok(program) => Check::ok("tpm", program.display().to_string()),
        Err(error) => {
            let fix = "apt install swtpm: machines with --tpm need it";
            Check::bad("tpm", CheckStatus::Warn, error.to_string(), fix)
        }
    }
}

/// Checks what goes into machines of container images.
pub(super) fn containers() -> Check {
    let found = GuestPrograms::of_this_host().and_then(|programs| Ok((programs, Kernel::of_this_host()?)));
    match found {
        Ok((programs, kernel)) => {
            let agent = if programs.has_agent() {
                ", qemu-ga"
            } else {
                "; without qemu-ga, `exec` does not work in them"
            };
            Check::ok("containers", format!("{}, busybox{agent}", kernel.image.display()))
        }
        Err(error) => {
            let fix = "apt install busybox-static qemu-guest-agent linux-image-cloud-amd64: machines of container images need them; \
                       another kernel can be named in the daemon's settings";
            Check::bad("containers", CheckStatus::Warn, error.to_string(), fix)
        }
    }
}

pub(super) fn daemon(socket: &Path) -> Check {
    match UnixStream::connect(socket) {
        Ok(_) => Check::ok("daemon", format!("listens on {}", socket.display())),
        Err(error) => {
            let fix = "whimbrel host";
            Check::bad("daemon", CheckStatus::Warn, format!("{}: {error}", socket.display()), fix)
        }
    }
}

/// Finds the first executable of that name in PATH.
fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|directory| directory.join(program)).find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_on_the_path_and_directories_are_not_programs() {
        assert!(find("sh").is_some());
        assert!(find("no-such-program-as-this").is_none());
        assert!(!is_executable(Path::new("/")));
    }
}

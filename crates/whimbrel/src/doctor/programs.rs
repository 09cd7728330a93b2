//! Checks of what is installed: QEMU, virtualisation, bridge tools, and whether a daemon runs.

use super::{Check, Verdict};
use std::{
    env, fs,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// `-netdev stream` came with QEMU 7.2.
const QEMU_MIN: (u32, u32) = (7, 2);
const QEMU: &str = "qemu-system-x86_64";

pub(super) fn qemu() -> Check {
    let install = "apt install qemu-system-x86, or put QEMU 7.2 or newer on the PATH";
    let Some(path) = find(QEMU) else {
        return Check::bad("qemu", Verdict::Fail, format!("no {QEMU} on the PATH"), install);
    };
    let answer = Command::new(&path).arg("--version").stdin(Stdio::null()).output();
    let text = answer.map(|answer| String::from_utf8_lossy(&answer.stdout).into_owned()).unwrap_or_default();
    match parse_version(&text) {
        Some((major, minor)) if (major, minor) >= QEMU_MIN => {
            Check::ok("qemu", format!("{major}.{minor}, {}", path.display()))
        }
        Some((major, minor)) => Check::bad("qemu", Verdict::Fail, format!("{major}.{minor}"), install),
        None => Check::bad("qemu", Verdict::Fail, format!("{} does not run", path.display()), install),
    }
}

/// From `QEMU emulator version 7.2.22 (Debian …)`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split_once("version ")?.1.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

pub(super) fn kvm() -> Check {
    let fix = "load kvm_intel or kvm_amd, or allow nested virtualisation; until then machines run under TCG, slowly";
    match fs::File::options().read(true).write(true).open("/dev/kvm") {
        // A device that opens may still run no guest (nested virtualisation). The daemon tries before it relies on it.
        Ok(_) => Check::ok("kvm", "/dev/kvm opens"),
        Err(error) => Check::bad("kvm", Verdict::Warn, format!("/dev/kvm: {error}"), fix),
    }
}

pub(super) fn bridge_tools() -> Check {
    match find("ip") {
        Some(path) => Check::ok("bridge tools", path.display().to_string()),
        None => {
            let fix = "apt install iproute2: bridges for --net are made with `ip link add br0 type bridge`";
            Check::bad("bridge tools", Verdict::Warn, "no ip on the PATH", fix)
        }
    }
}

pub(super) fn daemon(socket: &Path) -> Check {
    match UnixStream::connect(socket) {
        Ok(_) => Check::ok("daemon", format!("listens on {}", socket.display())),
        Err(error) => {
            let fix = "whimbrel host --name NAME --data DIR";
            Check::bad("daemon", Verdict::Warn, format!("{}: {error}", socket.display()), fix)
        }
    }
}

/// The first executable of that name on the PATH.
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
    fn the_version_is_found_in_what_qemu_prints() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright (c) 2003-2022";
        assert_eq!(parse_version(debian), Some((7, 2)));
        assert_eq!(parse_version("QEMU emulator version 10.0.2"), Some((10, 0)));
        assert!(parse_version("command not found").is_none());
    }

    #[test]
    fn programs_are_found_on_the_path_and_directories_are_not_programs() {
        assert!(find("sh").is_some());
        assert!(find("no-such-program-as-this").is_none());
        assert!(!is_executable(Path::new("/")));
    }
}

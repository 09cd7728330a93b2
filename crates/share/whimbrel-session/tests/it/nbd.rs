//! NBD exports of a session's file: real clients, each policy, and who may connect.

use crate::common::{World, pattern};
use std::{
    fs,
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, Instant},
};
use whimbrel_session::client::{
    Control, ControlRequest, ControlResponse, Policy, SessionOptions, send_request,
};

const SIZE: u64 = 4 << 20;

/// A session with a file that is served.
struct Served {
    world: World,
    control: Option<Control>,
    socket: PathBuf,
}

impl Served {
    fn new(policy: Policy) -> Self {
        let world = World::new(
            |options: &mut SessionOptions| {
                options.settings.policy = policy;
                options.settings.delay = None;
                options.settings.patience = 1;
            },
            |server| {
                fs::create_dir(server.join("vms")).unwrap();
                fs::write(server.join("vms/disk.raw"), pattern(SIZE as usize, 1)).unwrap();
            },
        );
        let (ended, _) = std::sync::mpsc::channel();
        let at = world.dir.path().join("control.sock");
        let control = Control::start(&at, world.session().clone(), world.mount(), ended).unwrap();
        let socket = world.dir.path().join("disk.sock");
        Self { world, control: Some(control), socket }
    }

    fn ask(&self, file: &str, socket: Option<&Path>) -> ControlResponse {
        let request = ControlRequest::Nbd { file: file.to_owned(), socket: socket.map(Path::to_owned) };
        send_request(&self.world.dir.path().join("control.sock"), &request).unwrap()
    }

    fn start(self) -> Self {
        let answer = self.ask("vms/disk.raw", Some(&self.socket));
        assert_eq!(answer.error, None);
        assert_eq!((answer.exports.len(), answer.exports[0].size), (1, SIZE));
        self
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    fn qemu_io(&self, commands: &[&str]) -> Output {
        let mut command = Command::new("qemu-io");
        command.args(["-t", "none", "-f", "raw"]);
        if commands.iter().all(|text| text.starts_with("read")) {
            command.arg("-r");
        }
        commands.iter().for_each(|text| _ = command.args(["-c", text]));
        command.arg(self.uri()).output().expect("qemu-io")
    }

    fn does(&self, commands: &[&str]) {
        let output = self.qemu_io(commands);
        let said = format!("{output:?}");
        assert!(
            output.status.success() && !said.contains("rror") && !said.contains("failed"),
            "{commands:?}: {said}"
        );
    }

    fn server_has(&self) -> Vec<u8> {
        fs::read(self.world.server().join("vms/disk.raw")).unwrap()
    }
}

#[test]
fn a_block_device_has_the_bytes_of_its_file_and_a_flush_is_a_sync_of_it() {
    for policy in [Policy::Through, Policy::Back] {
        let mut served = Served::new(policy).start();
        let copy = served.world.dir.path().join("copy");
        let copied = Command::new("nbdcopy").arg(served.uri()).arg(&copy).status().expect("nbdcopy");
        let mut expected = pattern(SIZE as usize, 1);
        assert!(copied.success() && fs::read(&copy).unwrap() == expected);
        served.does(&["write -P 0x5a 10000 70000", "flush", "read -P 0x5a 10000 70000"]);
        expected[10_000..80_000].fill(0x5a);
        served.does(&["write -f -P 0x3c 2M 4k", "discard 3M 65536", "write -z 3500000 9999", "flush"]);
        expected[2 << 20..(2 << 20) + 4096].fill(0x3c);
        expected[3 << 20..(3 << 20) + 65536].fill(0);
        expected[3_500_000..3_509_999].fill(0);
        assert_eq!(served.server_has() == expected, policy == Policy::Through, "{policy}: after a flush");
        // Programs on the mount see the same file.
        assert!(fs::read(served.world.mount().join("vms/disk.raw")).unwrap() == expected, "{policy}");
        if policy == Policy::Back {
            // Flushed data survives the death of the client's process.
            drop(served.control.take());
            served.world.crash();
            served.world.begin();
            assert!(fs::read(served.world.mount().join("vms/disk.raw")).unwrap() == expected);
        }
        served.world.session().flush().unwrap();
        assert!(served.server_has() == expected);
    }
}

#[test]
fn only_its_user_may_open_it_and_it_is_gone_with_the_session() {
    let served = Served::new(Policy::Back).start();
    assert_eq!(fs::metadata(&served.socket).unwrap().permissions().mode() & 0o777, 0o600);
    for (file, socket) in [
        ("vms/disk.raw", "other.sock"),
        ("vms", "other.sock"),
        ("vms/none", "other.sock"),
        ("../vms/disk.raw", "other.sock"),
        ("", "other.sock"),
        ("vms/disk.raw", "disk.sock"),
    ] {
        let answer = served.ask(file, Some(&served.world.dir.path().join(socket)));
        assert!(answer.error.is_some() && answer.exports.len() == 1, "{file:?} at {socket}");
    }
    assert!(!served.world.dir.path().join("other.sock").exists());
    served.does(&["write -P 7 0 4k"]);
    assert_eq!(served.ask("vms/disk.raw", None).error, None);
    assert!(!served.socket.exists(), "it was ended");
    assert!(served.ask("vms/disk.raw", None).error.is_some(), "and that once");
    let mut served = served.start();
    served.does(&["read -P 7 0 4k", "write -P 9 4k 4k"]);
    drop(served.control.take());
    assert!(!served.socket.exists());
    served.world.session().flush().unwrap();
    let head = served.server_has();
    assert!(head[..4096] == [7; 4096] && head[4096..8192] == [9; 4096]);
}

#[test]
fn nobody_writes_to_what_is_read_only_and_what_is_here_is_read_without_the_server() {
    let served = Served::new(Policy::None).start();
    assert!(served.ask("vms/disk.raw", Some(&served.socket)).exports[0].read_only);
    let refused = format!("{:?}", served.qemu_io(&["write -P 1 0 4k"]));
    assert!(refused.contains("Permission denied"), "{refused}");
    served.does(&["read 0 64k"]);
    served.world.wire.cut(true);
    served.does(&["read 0 64k"]);
    let missed = format!("{:?}", served.qemu_io(&["read 3M 64k"]));
    assert!(missed.contains("Input/output error"), "{missed}");
    served.world.wire.mend();
    // A read fails as long as the session has not connected again.
    let deadline = Instant::now() + Duration::from_secs(60);
    while !served.qemu_io(&["read 3M 64k"]).status.success() {
        assert!(Instant::now() < deadline, "the session does not come back");
    }
}

#[test]
fn a_file_that_somebody_else_cut_keeps_its_size_and_says_what_is_gone() {
    let served = Served::new(Policy::Through).start();
    let file = fs::OpenOptions::new().write(true).open(served.world.server().join("vms/disk.raw")).unwrap();
    file.set_len(1 << 20).unwrap();
    file.write_all_at(&[1; 4096], 0).unwrap();
    served.world.session().invalidate().unwrap();
    // The next lookup finds that the file has changed.
    assert_eq!(fs::metadata(served.world.mount().join("vms/disk.raw")).unwrap().len(), 1 << 20);
    served.does(&["read -P 1 0 4k"]);
    let gone = format!("{:?}", served.qemu_io(&["read 2M 4k"]));
    assert!(gone.contains("Input/output error"), "{gone}");
}

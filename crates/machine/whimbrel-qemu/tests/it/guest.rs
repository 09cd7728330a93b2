//! Linux guest that boots in two seconds: Debian's cloud kernel and a shell on the serial console.
//!
//! The kernel is downloaded once with apt and cached under `target/`. The guest's shell knows a few commands:
//! see [`INIT`].

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_core::{Boot, ByteSize, Digest, MachineConfig, NicConfig};
use whimbrel_machine::Machine;
use whimbrel_qemu::{Console, LaunchSpec, MachineUser, Qemu, RamBacking, Sharing, Subscription, probe};

pub(crate) const MEMORY: ByteSize = ByteSize(192 << 20);
/// Timeout far above any step.
pub(crate) const SOON: Duration = Duration::from_secs(120);

const MODULES: [&str; 12] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_modern_dev",
    "virtio_pci_legacy_dev",
    "virtio_pci",
    "failover",
    "net_failover",
    "virtio_net",
    "virtio_balloon",
    "virtio_blk",
    "pvpanic",
    "pvpanic-mmio",
];

/// The nonce and the count are only in guest memory.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for m in $(cat /mod/order); do insmod /mod/$m.ko; done
stty -echo
nonce=$(head -c 8 /dev/urandom | od -An -tx1 | tr -d ' ')
count=0
echo "READY $nonce."
while read word rest; do
    count=$((count + 1))
    case $word in
        count) echo "COUNT $count $nonce." ;;
        run) eval "$rest"; echo "DONE $count." ;;
    esac
done
"#;

struct Files {
    kernel: PathBuf,
    initrd: PathBuf,
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Built once in each process; the kernel once in each checkout.
fn files() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(|| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../target/guest-qemu");
        fs::create_dir_all(&dir).unwrap();
        let lock = File::create(dir.join("lock")).unwrap();
        lock.lock().unwrap();
        let tree = dir.join("linux");
        if !tree.exists() {
            download(&dir, &tree);
        }
        let kernel = fs::read_dir(tree.join("boot")).unwrap().map(|entry| entry.unwrap().path());
        let kernel = kernel.into_iter().find(|path| path.to_string_lossy().contains("vmlinuz")).unwrap();
        let initrd = dir.join("initrd");
        let fresh = tempfile::NamedTempFile::new_in(&dir).unwrap();
        make_initrd(&tree, fresh.path());
        fresh.persist(&initrd).unwrap();
        Files { kernel, initrd }
    })
}

fn download(dir: &Path, tree: &Path) {
    let work = tempfile::tempdir_in(dir).unwrap();
    let depends = Command::new("apt-cache").args(["depends", "linux-image-cloud-amd64"]).output().unwrap();
    let depends = String::from_utf8(depends.stdout).unwrap();
    let package = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image")).unwrap();
    run(Command::new("apt-get").args(["download", &format!("linux-image{package}")]).current_dir(&work));
    let deb = fs::read_dir(&work).unwrap().next().unwrap().unwrap().path();
    let unpacked = work.path().join("linux");
    run(Command::new("dpkg").arg("-x").args([&deb, &unpacked]));
    fs::rename(unpacked, tree).unwrap();
}

fn make_initrd(tree: &Path, to: &Path) {
    let root = tempfile::tempdir().unwrap();
    for dir in ["bin", "proc", "sys", "dev", "mod"] {
        fs::create_dir(root.path().join(dir)).unwrap();
    }
    fs::copy("/bin/busybox", root.path().join("bin/busybox")).unwrap();
    for module in MODULES {
        let name = format!("{module}.ko");
        let found =
            Command::new("find").arg(tree.join("lib/modules")).args(["-name", &name]).output().unwrap();
        let found = String::from_utf8(found.stdout).unwrap();
        fs::copy(found.lines().next().unwrap(), root.path().join("mod").join(name)).unwrap();
    }
    fs::write(root.path().join("mod/order"), MODULES.join(" ")).unwrap();
    fs::write(root.path().join("init"), INIT).unwrap();
    run(Command::new("chmod").arg("+x").arg(root.path().join("init")));
    let pack = "find . | busybox cpio -o -H newc > \"$0\"";
    run(Command::new("sh").args(["-c", pack]).arg(to).current_dir(&root));
}

/// Runtime directory and RAM file of one machine.
pub(crate) struct Slot {
    pub(crate) dir: TempDir,
    pub(crate) ram: PathBuf,
}

impl Slot {
    pub(crate) fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("wq").tempdir_in("/dev/shm").unwrap();
        let ram = dir.path().join("ram");
        Self { dir, ram }
    }

    /// One whose QEMU is confined: it runs as a user of its own.
    pub(crate) fn confined() -> Self {
        let (slot, user) = (Self::new(), MachineUser::of_random(u64::from(std::process::id())));
        chown(slot.dir.path(), None, Some(user.number())).unwrap();
        fs::set_permissions(slot.dir.path(), fs::Permissions::from_mode(0o710)).unwrap();
        File::create(&slot.ram).and_then(|ram| ram.set_len(MEMORY.0)).unwrap();
        slot
    }

    pub(crate) fn console_log(&self) -> PathBuf {
        self.dir.path().join("console.log")
    }

    pub(crate) fn spec(&self, sharing: Sharing) -> LaunchSpec {
        let files = files();
        let digest = Digest::of(b"not looked at");
        let config = MachineConfig {
            machine: probe().unwrap().machine_type("q35").unwrap().to_owned(),
            nics: vec![NicConfig { mac: "52:54:00:12:34:56".into(), bridge: None }],
            boot: Some(Boot {
                kernel: digest,
                initrd: Some(digest),
                append: "console=ttyS0 quiet panic=-1".into(),
            }),
            ..MachineConfig::minimal(MEMORY)
        };
        let ram = RamBacking { path: self.ram.clone(), sharing };
        LaunchSpec {
            kernel: Some(files.kernel.clone()),
            initrd: Some(files.initrd.clone()),
            ..LaunchSpec::new(config, self.dir.path(), ram)
        }
    }
}

/// Machine with its console, ended when dropped.
pub(crate) struct Guest {
    pub(crate) qemu: Option<Qemu>,
    pub(crate) slot: Slot,
    pub(crate) console: Console,
    output: Subscription,
    seen: String,
}

impl Guest {
    /// New machine that has booted.
    pub(crate) fn boot() -> Self {
        let mut guest = Self::launch(Slot::new(), |_| ());
        guest.qemu().unpause().unwrap();
        guest
    }

    /// New machine that has not run yet.
    pub(crate) fn launch(slot: Slot, change: impl FnOnce(&mut LaunchSpec)) -> Self {
        Self::launch_by(&probe().unwrap().path, slot, change)
    }

    /// New machine of another QEMU program.
    pub(crate) fn launch_by(binary: &Path, slot: Slot, change: impl FnOnce(&mut LaunchSpec)) -> Self {
        let mut spec = slot.spec(Sharing::Shared);
        change(&mut spec);
        let qemu = Qemu::launch(binary, &spec).unwrap();
        Self::resume(qemu, slot)
    }

    /// Machine that was started separately.
    pub(crate) fn resume(qemu: Qemu, slot: Slot) -> Self {
        let console =
            Console::open(&slot.spec(Sharing::Shared).serial_socket(), &slot.console_log()).unwrap();
        let output = console.subscribe();
        Self { qemu: Some(qemu), slot, console, seen: String::new(), output }
    }

    /// Second machine with a copy of the memory of `self`, paused, before its state is loaded.
    pub(crate) fn twin(&mut self, sharing: Sharing) -> Self {
        let slot = Slot::new();
        fs::copy(&self.slot.ram, &slot.ram).unwrap();
        Self::launch(slot, |spec| {
            spec.incoming = true;
            spec.ram.sharing = sharing;
        })
    }

    pub(crate) fn qemu(&mut self) -> &mut Qemu {
        self.qemu.as_mut().unwrap()
    }

    /// Text between `before` and the next full stop, in output not read yet.
    pub(crate) fn expect(&mut self, before: &str) -> String {
        let deadline = Instant::now() + SOON;
        loop {
            if let Some((_, rest)) = self.seen.split_once(before)
                && let Some((found, rest)) = rest.split_once('.')
            {
                let found = found.trim().to_owned();
                self.seen = rest.to_owned();
                return found;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let piece = self.output.receive(left).unwrap();
            assert!(!piece.is_empty(), "no {before:?} in {:?}", self.seen);
            self.seen.push_str(&String::from_utf8_lossy(&piece));
        }
    }

    pub(crate) fn say(&mut self, words: &str) {
        self.console.write(format!("{words}\n").as_bytes()).unwrap();
    }

    /// Number of commands that it has received, and its nonce.
    pub(crate) fn count(&mut self) -> (u32, String) {
        self.say("count");
        let answer = self.expect("COUNT ");
        let (count, nonce) = answer.split_once(' ').unwrap();
        (count.parse().unwrap(), nonce.to_owned())
    }

    pub(crate) fn run(&mut self, script: &str) {
        self.say(&format!("run {script}"));
        self.expect("DONE ");
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some(qemu) = self.qemu.take() {
            qemu.kill();
        }
        if std::thread::panicking() {
            let _ = writeln!(std::io::stderr(), "the guest's last words: {}", self.seen);
        }
    }
}

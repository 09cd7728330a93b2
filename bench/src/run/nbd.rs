//! `nbd.*`: how fast a disk is that we serve, beside `qemu-nbd` on the same raw file.
//!
//! The file lies in the page cache for both, so that the servers are measured and not the disk under them.
//! Two clients: fio with libnbd, which adds little of its own, and `qemu-img bench`, which is the block layer
//! that a guest goes through.

use super::Context;
use super::qemu_nbd::QemuNbd;
use crate::harness::{Goal, Row, alternate};
use anyhow::{Context as _, Result, ensure};
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;
use whimbrel_block::FileDevice;
use whimbrel_nbd::{Options, Server, bind, serve};

const DISK_MIB: usize = 512;
/// Seconds of one fio run.
const SECONDS: u32 = 3;

/// Both servers in front of files with the same content.
struct Pair {
    ours: PathBuf,
    theirs: PathBuf,
    _server: Server,
    _peer: QemuNbd,
    _folder: TempDir,
}

impl Pair {
    fn start() -> Result<Self> {
        // Short: the path of a unix socket has at most 107 bytes.
        let folder = tempfile::Builder::new().prefix("wn").tempdir_in("/dev/shm")?;
        let disk = |name: &str| -> Result<PathBuf> {
            let path = folder.path().join(name);
            let mut file = File::create(&path)?;
            (0..DISK_MIB).try_for_each(|mib| file.write_all(&vec![mib as u8 | 1; 1 << 20]))?;
            Ok(path)
        };
        let device = Arc::new(FileDevice::open(&disk("a")?)?);
        let ours = folder.path().join("a.sock");
        let server = serve(device, bind(&ours)?, Options::default())?;
        let peer = QemuNbd::writable(&disk("b")?, &folder.path().join("b.sock"))?;
        let theirs = peer.socket().to_owned();
        Ok(Self { ours, theirs, _server: server, _peer: peer, _folder: folder })
    }

    /// A row of what `measure` says of each.
    fn row(
        &self,
        times: usize,
        row: &'static str,
        case: &str,
        unit: &'static str,
        measure: impl Fn(&Path) -> Result<f64>,
    ) -> Result<Row> {
        let (ours, theirs) = alternate(times, || measure(&self.ours), || measure(&self.theirs))?;
        Ok(Row::new(row, case, unit, &ours).against("qemu-nbd", &theirs).goal(Goal::PeerAtLeast(0.9)))
    }
}

/// Single pages in no order.
pub(crate) fn randread(context: &Context) -> Result<Vec<Row>> {
    let pair = Pair::start()?;
    let times = context.times(5, 2);
    let fio = |depth: u32| move |socket: &Path| fio(socket, "randread", "4k", depth, "iops");
    Ok(vec![
        pair.row(times, "nbd.randread", "4 KiB, depth 1, fio", "IOPS", fio(1))?,
        pair.row(times, "nbd.randread", "4 KiB, depth 32, fio", "IOPS", fio(32))?,
        pair.row(times, "nbd.randread", "4 KiB, depth 32, QEMU", "IOPS", qemu_reads)?,
    ])
}

/// Large writes one after the other.
pub(crate) fn seqwrite(context: &Context) -> Result<Vec<Row>> {
    let pair = Pair::start()?;
    let times = context.times(5, 2);
    let fio = |socket: &Path| Ok(fio(socket, "write", "1M", 8, "bw_bytes")? / 1e6);
    Ok(vec![
        pair.row(times, "nbd.seqwrite", "1 MiB, depth 8, fio", "MB/s", fio)?,
        pair.row(times, "nbd.seqwrite", "1 MiB, depth 8, QEMU", "MB/s", qemu_writes)?,
    ])
}

/// What fio reports as `field` of a run against the export at `socket`.
fn fio(socket: &Path, pattern: &str, block: &str, depth: u32, field: &str) -> Result<f64> {
    let arguments = [
        "--name=bench".to_owned(),
        "--ioengine=nbd".to_owned(),
        format!("--uri=nbd+unix:///?socket={}", socket.display()),
        format!("--rw={pattern}"),
        format!("--bs={block}"),
        format!("--iodepth={depth}"),
        format!("--size={DISK_MIB}M"),
        "--time_based".to_owned(),
        format!("--runtime={SECONDS}"),
        "--output-format=json".to_owned(),
    ];
    let json = output(Command::new("fio").args(arguments))?;
    // libnbd may print a line of its own before the report.
    let report: serde_json::Value =
        serde_json::from_str(json.get(json.find('{').unwrap_or(0)..).unwrap_or(""))?;
    let side = if pattern.contains("read") { "read" } else { "write" };
    report["jobs"][0][side][field].as_f64().with_context(|| format!("fio reports no {field}"))
}

/// IOPS of single pages, far apart, through QEMU's block layer.
fn qemu_reads(socket: &Path) -> Result<f64> {
    const COUNT: u32 = 60_000;
    // An odd number of pages: every page of the disk comes up before one comes again.
    let step = format!("{}", 4096 * 40_503);
    let seconds = qemu_bench(socket, &["-c", &COUNT.to_string(), "-d", "32", "-s", "4096", "-S", &step])?;
    Ok(f64::from(COUNT) / seconds)
}

/// MB/s of large writes through QEMU's block layer.
fn qemu_writes(socket: &Path) -> Result<f64> {
    const COUNT: u32 = 2_000;
    let seconds = qemu_bench(socket, &["-w", "-c", &COUNT.to_string(), "-d", "8", "-s", "1048576"])?;
    Ok(f64::from(COUNT) * 1.048_576 / seconds)
}

/// Seconds that `qemu-img bench` takes.
fn qemu_bench(socket: &Path, arguments: &[&str]) -> Result<f64> {
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let text = output(
        Command::new("qemu-img").arg("bench").args(arguments).args(["-f", "raw", "-t", "none"]).arg(uri),
    )?;
    let seconds = text.lines().find_map(|line| line.strip_prefix("Run completed in ")?.split(' ').next());
    Ok(seconds.context("qemu-img bench reports no time")?.parse()?)
}

fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot start {program}"))?;
    ensure!(output.status.success(), "{program} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8(output.stdout)?)
}

//! Types of arguments: rates, durations, disks, network ports, labels. Each error names the expected form.

use clap::ValueEnum;
use std::{
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};
use whimbrel_api::{
    BalloonTarget, CapsuleRef, CapsuleRefError, DiskSource, ExportFormat, HostPort, ImportFormat,
    MoveNetwork, NicRequest, PortProtocol, PortRequest, RESTARTS_MAX, RestartPolicy, RestartRule,
    SelfService, SnapshotRule, is_bucket,
};
use whimbrel_core::{Accel, ByteSize, HostName, NameError};

/// Text that is not a value of an option.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {what}: write {example}")]
pub(crate) struct ValueError {
    text: String,
    what: &'static str,
    example: &'static str,
}

/// Executor of guest instructions.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum AccelArg {
    /// Translator of QEMU; works everywhere
    Tcg,
    /// Hardware virtualisation of the CPU
    Kvm,
}

impl From<AccelArg> for Accel {
    fn from(argument: AccelArg) -> Self {
        match argument {
            AccelArg::Tcg => Self::Tcg,
            AccelArg::Kvm => Self::Kvm,
        }
    }
}

/// Capsule with its place: `[HOST:]CAPSULE`, `pool:MANAGER/[FOLDER/]CAPSULE` or
/// `s3://BUCKET/[PREFIX/]CAPSULE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Located {
    /// Host that has the capsule; any host if none.
    pub(crate) host: Option<HostName>,
    /// Pool or bucket that has the capsule.
    pub(crate) pool: Option<String>,
    /// Name of the capsule there.
    pub(crate) capsule: CapsuleRef,
}

impl FromStr for Located {
    type Err = CapsuleRefError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some((bucket, capsule)) = text.rsplit_once('/').filter(|_| is_bucket(text)) {
            return Ok(Self { host: None, pool: Some(bucket.to_owned()), capsule: capsule.parse()? });
        }
        if let Some((pool, capsule)) = text.strip_prefix(POOL).and_then(|text| text.rsplit_once('/')) {
            return Ok(Self { host: None, pool: Some(pool.to_owned()), capsule: capsule.parse()? });
        }
        let (host, capsule) = match text.split_once(':') {
            Some((host, capsule)) => (Some(host.parse()?), capsule),
            None => (None, text),
        };
        Ok(Self { host, pool: None, capsule: capsule.parse()? })
    }
}

/// Prefix of the name of a pool.
const POOL: &str = "pool:";

/// Reads the location of a bucket.
pub(crate) fn bucket(text: &str) -> Result<String, &'static str> {
    if is_bucket(text) { Ok(text.to_owned()) } else { Err("a bucket is s3://BUCKET[/PREFIX]") }
}

/// Target of a push.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PushTarget {
    /// Name of a host.
    Host(HostName),
    /// Folder of a pool, or a bucket.
    Pool(String),
}

impl FromStr for PushTarget {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        match text.strip_prefix(POOL).or(Some(text).filter(|text| is_bucket(text))) {
            Some(place) => Ok(Self::Pool(place.to_owned())),
            None => text.parse().map(Self::Host),
        }
    }
}

impl PushTarget {
    /// Splits the target into host and pool, one of which is set.
    pub(crate) fn apart(self) -> (Option<HostName>, Option<String>) {
        match self {
            Self::Host(host) => (Some(host), None),
            Self::Pool(pool) => (None, Some(pool)),
        }
    }
}

/// Rate in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RateArg(pub(crate) ByteSize);

impl FromStr for RateArg {
    type Err = ValueError;

    /// Parses bytes with the suffixes of sizes (powers of 1024), or bits with the suffix `bit` (powers of
    /// 1000).
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let example = "bytes per second like 100M or 100MiB/s, or bits like 800Mbit";
        let fail = || ValueError { text: text.to_owned(), what: "rate", example };
        let plain = text.strip_suffix("/s").unwrap_or(text);
        let bytes = match plain.strip_suffix("bit") {
            Some(bits) => bits_to_bytes(bits),
            None => plain.parse().ok(),
        };
        bytes.filter(|rate| rate.0 > 0).map(Self).ok_or_else(fail)
    }
}

fn bits_to_bytes(bits: &str) -> Option<ByteSize> {
    let (number, factor) = match bits.char_indices().last()? {
        (at, 'k' | 'K') => (&bits[..at], 1_000),
        (at, 'M') => (&bits[..at], 1_000_000),
        (at, 'G') => (&bits[..at], 1_000_000_000),
        _ => (bits, 1),
    };
    Some(ByteSize(number.parse::<u64>().ok()?.checked_mul(factor)? / 8))
}

/// Duration, like `50ms`, `2s`, `1m` or `7d`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DurationArg(pub(crate) Duration);

impl FromStr for DurationArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let example = "a whole number with ms, s, m, h or d, like 50ms";
        let fail = || ValueError { text: text.to_owned(), what: "duration", example };
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let factor = match &text[digits..] {
            "ms" => 1,
            "s" => 1_000,
            "m" | "min" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(fail()),
        };
        let number: u64 = text[..digits].parse().map_err(|_| fail())?;
        number.checked_mul(factor).map(|ms| Self(Duration::from_millis(ms))).ok_or_else(fail)
    }
}

impl DurationArg {
    /// Length in milliseconds.
    pub(crate) fn as_ms(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }
}

/// Snapshot rule `NUMBER/UNIT,COUNT`: the rate of snapshots, and how many are retained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SnapshotRuleArg(pub(crate) SnapshotRule);

impl FromStr for SnapshotRuleArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let example = "a number per s, min, h or d, and how many to retain, like 1/min,60";
        let rule = || {
            let (rate, count) = text.split_once(',')?;
            let (number, unit) = rate.split_once('/')?;
            let unit = match unit {
                "s" => 1_000,
                "m" | "min" => 60_000,
                "h" => 3_600_000,
                "d" => 86_400_000,
                _ => return None,
            };
            let number = number.parse::<u64>().ok().filter(|number| *number > 0)?;
            Some(SnapshotRule { every_ms: unit / number, count: count.parse().ok()? })
        };
        rule().map(Self).ok_or_else(|| ValueError {
            text: text.to_owned(),
            what: "rule for snapshots",
            example,
        })
    }
}

/// Disk of a new machine: `FILE[,size=SIZE]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskArg(pub(crate) DiskSource);

impl FromStr for DiskArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let example = "FILE or FILE,size=20G";
        let fail = || ValueError { text: text.to_owned(), what: "disk", example };
        let (path, size) = match text.rsplit_once(",size=") {
            Some((path, size)) => (path, Some(size.parse().map_err(|_| fail())?)),
            None => (text, None),
        };
        // The daemon has another working directory.
        let path = std::path::absolute(path).map_err(|_| fail())?;
        Ok(Self(DiskSource { path, size }))
    }
}

/// Network port: `BRIDGE[,mac=ADDRESS]`, or `none` for an unplugged one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NicArg(pub(crate) NicRequest);

impl FromStr for NicArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let example = "BRIDGE, BRIDGE,mac=52:54:00:12:34:56 or none";
        let fail = || ValueError { text: text.to_owned(), what: "network port", example };
        let (bridge, mac) = match text.split_once(",mac=") {
            Some((bridge, mac)) if is_mac(mac) => (bridge, Some(mac.to_lowercase())),
            Some(_) => return Err(fail()),
            None => (text, None),
        };
        // Linux refuses interface names of more than 15 bytes, and those with a slash or a blank.
        if bridge.is_empty() || bridge.len() > 15 || bridge.contains(['/', ' ', ',']) {
            return Err(fail());
        }
        let bridge = (bridge != "none").then(|| bridge.to_owned());
        Ok(Self(NicRequest { bridge, mac }))
    }
}

fn is_mac(text: &str) -> bool {
    let pair = |pair: &str| pair.len() == 2 && pair.bytes().all(|byte| byte.is_ascii_hexdigit());
    text.split(':').count() == 6 && text.split(':').all(pair)
}

/// Published port: `[ADDRESS:]PORT:PORT[/udp]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PortArg(pub(crate) PortRequest);

impl FromStr for PortArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let example = "2222:22, 53:53/udp or 127.0.0.1:8080:80";
        let fail = || ValueError { text: text.to_owned(), what: "published port", example };
        let (ports, protocol) = split_protocol(text).ok_or_else(fail)?;
        let mut parts = ports.rsplitn(3, ':');
        let mut number = || parts.next().and_then(|part| part.parse::<u16>().ok()).filter(|port| *port != 0);
        let (guest_port, port) = (number().ok_or_else(fail)?, number().ok_or_else(fail)?);
        let listen = parts.next().map(|address| address.parse().map_err(|_| fail())).transpose()?;
        Ok(Self(PortRequest { listen, port, guest_port, protocol }))
    }
}

/// Port of this host: `PORT[/udp]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostPortArg(pub(crate) HostPort);

impl FromStr for HostPortArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let fail = || ValueError { text: text.to_owned(), what: "port", example: "2222 or 53/udp" };
        let (port, protocol) = split_protocol(text).ok_or_else(fail)?;
        Ok(Self(HostPort { port: port.parse().map_err(|_| fail())?, protocol }))
    }
}

fn split_protocol(text: &str) -> Option<(&str, PortProtocol)> {
    match text.split_once('/') {
        None => Some((text, PortProtocol::Tcp)),
        Some((ports, "tcp")) => Some((ports, PortProtocol::Tcp)),
        Some((ports, "udp")) => Some((ports, PortProtocol::Udp)),
        Some(_) => None,
    }
}

/// Label of a capsule: `KEY=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LabelArg(pub(crate) String, pub(crate) String);

impl FromStr for LabelArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let fail = || ValueError { text: text.to_owned(), what: "label", example: "KEY=VALUE" };
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok(Self(key.to_owned(), value.to_owned())),
            _ => Err(fail()),
        }
    }
}

/// Start with the host: `no`, `yes`, or the place among the host's machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AutostartArg {
    Off,
    On(u32),
}

impl FromStr for AutostartArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let example = "yes, no, or a number: lower ones start first";
        match text {
            "no" => Ok(Self::Off),
            "yes" => Ok(Self::On(0)),
            order => order.parse().map(Self::On).map_err(|_| ValueError {
                text: text.to_owned(),
                what: "start with the host",
                example,
            }),
        }
    }
}

/// Rule of restarts: `no`, `on-failure` or `always`, with the most restarts in a row after a colon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RestartArg(pub(crate) RestartRule);

impl FromStr for RestartArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let example = "no, on-failure or always, like on-failure:5";
        let rule = || {
            let (policy, limit) = match text.split_once(':') {
                Some((policy, limit)) => (policy, limit.parse().ok().filter(|limit| *limit > 0)?),
                None => (text, RESTARTS_MAX),
            };
            let policy = match policy {
                "no" => RestartPolicy::No,
                "on-failure" => RestartPolicy::OnFailure,
                "always" => RestartPolicy::Always,
                _ => return None,
            };
            Some(RestartRule { policy, limit })
        };
        rule().map(Self).ok_or_else(|| ValueError {
            text: text.to_owned(),
            what: "rule of restarts",
            example,
        })
    }
}

/// Balloon target: `auto`, `off` or a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BalloonArg(pub(crate) BalloonTarget);

impl FromStr for BalloonArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let fail = |_| ValueError { text: text.to_owned(), what: "balloon", example: "auto, off or 256M" };
        Ok(Self(match text {
            "auto" => BalloonTarget::Auto,
            "off" => BalloonTarget::Off,
            size => BalloonTarget::To { size: size.parse().map_err(fail)? },
        }))
    }
}

/// Network of a machine that was moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum NetworkArg {
    /// Bridges of the host where the machine runs
    Local,
    /// Bridges of its home host, through a tunnel; the machine keeps its addresses and connections
    Home,
}

impl From<NetworkArg> for MoveNetwork {
    fn from(network: NetworkArg) -> Self {
        match network {
            NetworkArg::Local => Self::Local,
            NetworkArg::Home => Self::Home,
        }
    }
}

/// Throttle: `auto`, `off` or a percentage of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Throttle(pub(crate) Option<u8>);

impl FromStr for Throttle {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let wrong =
            || ValueError { text: text.to_owned(), what: "throttle", example: "auto, off or 20 to 100" };
        match text {
            "auto" => Ok(Self(None)),
            "off" => Ok(Self(Some(100))),
            _ => {
                let percent = text.strip_suffix('%').unwrap_or(text).parse().ok();
                percent
                    .filter(|percent| (20..=100).contains(percent))
                    .map(|p| Self(Some(p)))
                    .ok_or_else(wrong)
            }
        }
    }
}

/// Operation that a guest may request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GuestRequestArg {
    /// Migration to this host.
    Migrate(HostName),
    /// Checkpoint of the machine.
    Checkpoint,
}

impl FromStr for GuestRequestArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let what = "guest request";
        let wrong = || ValueError { text: text.to_owned(), what, example: "migrate=beta or checkpoint" };
        match text.split_once('=') {
            Some(("migrate", host)) => host.parse().map(Self::Migrate).map_err(|_| wrong()),
            None if text == "checkpoint" => Ok(Self::Checkpoint),
            _ => Err(wrong()),
        }
    }
}

impl GuestRequestArg {
    /// Merges the permissions of a machine.
    pub(crate) fn all(requests: Vec<Self>) -> SelfService {
        let mut all = SelfService::default();
        for request in requests {
            match request {
                Self::Migrate(host) => all.migrate.push(host),
                Self::Checkpoint => all.checkpoint = true,
            }
        }
        all
    }
}

/// Content of an imported file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ImportFormatArg {
    /// Complete capsule in one file
    Capsule,
    /// Image of a disk: raw, qcow2, vmdk, vhdx or vpc, whichever the content is, also compressed
    #[value(aliases = ["raw", "qcow2"])]
    Disk,
}

impl ImportFormatArg {
    /// Format that was given, or else that of the ending of `path`.
    pub(crate) fn or_from_ending(given: Option<Self>, path: &Path) -> ImportFormat {
        let ending_of = |path: &Path| path.extension()?.to_str().map(str::to_owned);
        // `debian.qcow2.xz` is an image in the format that its name has before.
        let ending = match ending_of(path).as_deref() {
            Some("gz" | "xz" | "zst") => path.file_stem().and_then(|stem| ending_of(Path::new(stem))),
            _ => ending_of(path),
        };
        match (given, ending.as_deref()) {
            (Some(Self::Capsule), _) => ImportFormat::Capsule,
            (Some(Self::Disk), _) => ImportFormat::Disk,
            (None, Some("raw" | "img" | "qcow2" | "vmdk" | "vhdx" | "vhd" | "ova")) => ImportFormat::Disk,
            (None, _) => ImportFormat::Capsule,
        }
    }
}

/// Content of an exported file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum FormatArg {
    /// Complete capsule in one file
    Capsule,
    /// One image, byte by byte, with holes
    Raw,
    /// One image in the format qcow2 of QEMU
    Qcow2,
}

impl FormatArg {
    /// Format that was given, or else that of the ending of `path`.
    pub(crate) fn or_from_ending(given: Option<Self>, path: &Path) -> Self {
        given.unwrap_or_else(|| match path.extension().and_then(|ending| ending.to_str()) {
            Some("raw" | "img") => Self::Raw,
            Some("qcow2") => Self::Qcow2,
            _ => Self::Capsule,
        })
    }
}

impl From<FormatArg> for ExportFormat {
    fn from(format: FormatArg) -> Self {
        match format {
            FormatArg::Capsule => Self::Capsule,
            FormatArg::Raw => Self::Raw,
            FormatArg::Qcow2 => Self::Qcow2,
        }
    }
}

pub(crate) fn absolute(text: &str) -> Result<PathBuf, std::io::Error> {
    std::path::absolute(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_bytes_unless_they_say_bit() {
        let rate = |text: &str| text.parse::<RateArg>().map(|rate| rate.0.0);
        assert_eq!(rate("100M"), Ok(100 << 20));
        assert_eq!(rate("1MiB/s"), Ok(1 << 20));
        assert_eq!(
            (rate("800Mbit"), rate("1Gbit/s"), rate("8bit")),
            (Ok(100_000_000), Ok(125_000_000), Ok(1))
        );
        for bad in ["", "0", "bit", "Mbit", "fast", "-1", "é", "ébit"] {
            assert!(rate(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_balloon_is_a_word_or_a_size() {
        let balloon = |text: &str| text.parse::<BalloonArg>().map(|balloon| balloon.0);
        assert_eq!((balloon("auto"), balloon("off")), (Ok(BalloonTarget::Auto), Ok(BalloonTarget::Off)));
        assert_eq!(balloon("64M"), Ok(BalloonTarget::To { size: ByteSize(64 << 20) }));
        assert!(balloon("on").unwrap_err().to_string().contains("auto, off or 256M"));
    }

    #[test]
    fn durations_need_a_unit() {
        assert_eq!("50ms".parse(), Ok(DurationArg(Duration::from_millis(50))));
        assert_eq!("2m".parse(), Ok(DurationArg(Duration::from_secs(120))));
        assert_eq!("7d".parse(), Ok(DurationArg(Duration::from_secs(604_800))));
        let error = "50".parse::<DurationArg>().unwrap_err().to_string();
        assert!(error.contains("like 50ms"), "{error}");
        assert!("99999999999999999999ms".parse::<DurationArg>().is_err());
    }

    #[test]
    fn a_disk_with_a_comma_in_its_name_is_still_a_disk() {
        let disk = "/a,b.img,size=2G".parse::<DiskArg>().unwrap().0;
        assert_eq!((disk.path.to_str(), disk.size), (Some("/a,b.img"), Some(ByteSize(2 << 30))));
        assert!("x.img".parse::<DiskArg>().unwrap().0.path.is_absolute());
        assert!("".parse::<DiskArg>().is_err() && "/a,size=big".parse::<DiskArg>().is_err());
    }

    #[test]
    fn ports_with_impossible_bridges_or_addresses_are_refused() {
        assert_eq!("none".parse::<NicArg>().unwrap().0, NicRequest::default());
        let port = "br0,mac=52:54:00:AB:00:01".parse::<NicArg>().unwrap().0;
        assert_eq!(port.mac.as_deref(), Some("52:54:00:ab:00:01"));
        for bad in
            ["", "a/b", "sixteen-bytes-xx", "br0,mac=1", "br0,mac=52:54:00:12:34:5g", "br0,model=e1000"]
        {
            assert!(bad.parse::<NicArg>().is_err(), "{bad}");
        }
    }

    #[test]
    fn published_ports_are_read_as_docker_writes_them() {
        let port = |text: &str| text.parse::<PortArg>().map(|port| port.0).ok();
        let all = PortRequest { listen: None, port: 2222, guest_port: 22, protocol: PortProtocol::Tcp };
        assert_eq!(port("2222:22"), Some(all));
        assert_eq!(port("2222:22/udp"), Some(PortRequest { protocol: PortProtocol::Udp, ..all }));
        assert_eq!(
            port("127.0.0.1:2222:22"),
            Some(PortRequest { listen: Some([127, 0, 0, 1].into()), ..all })
        );
        for bad in ["22", "0:22", "2222:0", "2222:22/icmp", "host:2222:22", ":2222:22", "99999:22", "1:2:3:4"]
        {
            assert_eq!(port(bad), None, "{bad}");
        }
        assert_eq!("53/udp".parse::<HostPortArg>().map(|port| port.0.protocol).ok(), Some(PortProtocol::Udp));
    }
}

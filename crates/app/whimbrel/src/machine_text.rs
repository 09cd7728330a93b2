//! Text about machines: a line, a table, the state in a few words.

use crate::{
    round_text,
    table::{ago, count, fields, table, until},
};
use whimbrel_api::{
    Autostart, HostMachines, MachineInfo, MachineSettings, MachineState, RestartPolicy, RestartRule,
};
use whimbrel_core::Accel;

/// Formats one machine, like `web: running`.
pub(crate) fn sentence(machine: &MachineInfo) -> String {
    format!("{}: {}\n", machine.name, state_of(machine))
}

/// State of a machine in a few words, with its other host if it is known.
pub(crate) fn state_of(machine: &MachineInfo) -> String {
    let away = machine.tunnel.as_ref().and_then(|tunnel| tunnel.away.as_ref());
    match (&machine.state, away) {
        (MachineState::Remote, Some(host)) => format!("runs on {host}, network here"),
        (other, _) => state(other),
    }
}

pub(crate) fn state(state: &MachineState) -> String {
    match state {
        MachineState::Starting => "starting".to_owned(),
        MachineState::Running => "running".to_owned(),
        MachineState::Paused => "paused".to_owned(),
        MachineState::Loading { resident_pages, total_pages, stalled, from } => {
            let percent = resident_pages.saturating_mul(100) / (*total_pages).max(1);
            let from = from.as_ref().map(|host| format!(", rest on {host}")).unwrap_or_default();
            match stalled {
                Some(why) => format!("running, {percent} % loaded{from}, stalled: {why}"),
                None => format!("running, {percent} % loaded{from}"),
            }
        }
        MachineState::ServingPages { to, missing_pages, stalled } => {
            let missing = missing_pages.map(|pages| format!(", {} to send", round_text::pages(pages)));
            let missing = missing.unwrap_or_default();
            match stalled {
                Some(why) => format!("moved to {to}{missing}, stalled: {why}"),
                None => format!("moved to {to}{missing}"),
            }
        }
        MachineState::Migrating => "migrating".to_owned(),
        MachineState::Suspended => "suspended".to_owned(),
        MachineState::HandedOff { to } => format!("handed off to {to}"),
        MachineState::Remote => "runs on another host, network here".to_owned(),
        MachineState::Stopped => "stopped".to_owned(),
        MachineState::Crashed { reason } => format!("crashed: {reason}"),
        MachineState::Unreadable { reason } => format!("unreadable record: {reason}"),
    }
}

/// Formats machines as a table, with lines about protection and uploads.
pub(crate) fn list(machines: &[MachineInfo]) -> String {
    let rows = machines.iter().map(|machine| {
        [
            machine.name.to_string(),
            crate::protection_text::standby(machine).unwrap_or_else(|| state_of(machine)),
            machine.memory.to_string(),
            machine.cpus.to_string(),
            machine.disks.len().to_string(),
            network(machine),
            addresses(machine),
            machine.pid.map(|pid| pid.to_string()).unwrap_or_default(),
            ago(machine.since_ms),
        ]
    });
    let header = ["NAME", "STATE", "MEMORY", "CPUS", "DISKS", "NETWORK", "ADDRESS", "PID", "SINCE"];
    let list = table(header, rows, "no machines; start one with `whimbrel run NAME --disk FILE --memory 1G`");
    list + &crate::protection_text::lines(machines) + &machines.iter().map(care).collect::<String>()
}

/// Formats machines of several hosts as a table, with lines about hosts that do not answer.
pub(crate) fn list_of_hosts(hosts: &[HostMachines]) -> String {
    let all = hosts.iter().flat_map(|host| host.machines.iter().map(move |machine| (host, machine)));
    let rows = all.map(|(host, machine)| {
        [
            host.name.to_string(),
            machine.name.to_string(),
            crate::protection_text::standby(machine).unwrap_or_else(|| state_of(machine)),
            machine.memory.to_string(),
            machine.cpus.to_string(),
            network(machine),
            addresses(machine),
            ago(machine.since_ms),
        ]
    });
    let header = ["HOST", "NAME", "STATE", "MEMORY", "CPUS", "NETWORK", "ADDRESS", "SINCE"];
    let silent = hosts.iter().filter_map(|host| Some(format!("{}: {}\n", host.name, host.failure.as_ref()?)));
    table(header, rows, "no machines") + &silent.collect::<String>()
}

/// Lines about uploads, restarts and schedules of a machine.
fn care(machine: &MachineInfo) -> String {
    let failed = machine.failed_care.iter().map(|why| format!("{}: schedule FAILED: {why}\n", machine.name));
    uploads(machine).into_iter().chain(restarts(machine)).chain(failed).collect()
}

/// Line about restarts of a machine that ended by itself.
fn restarts(machine: &MachineInfo) -> Option<String> {
    let (name, restarts) = (&machine.name, machine.restarts.as_ref()?);
    let failure = restarts.failure.as_ref().map(|why| format!("; could not be started: {why}"));
    let failure = failure.unwrap_or_default();
    let times = match restarts.count {
        0 => String::new(),
        number => format!("started by itself {}", count(number.into(), "time")),
    };
    let next = match (restarts.gave_up, restarts.next_ms) {
        (true, _) => "; NOT RESTARTED ANY MORE: see `whimbrel logs`, then `whimbrel start`".to_owned(),
        (false, Some(at)) => format!("; the next start is in {}", until(at)),
        (false, None) => String::new(),
    };
    let text = format!("{times}{failure}{next}");
    Some(format!("{name}: {}\n", text.trim_start_matches("; ")))
}

/// Whether a machine has a label `KEY`, or `KEY=VALUE`.
pub(crate) fn has_label(machine: &MachineInfo, wanted: &str) -> bool {
    let labels = &machine.settings.labels;
    match wanted.split_once('=') {
        Some((key, value)) => labels.get(key).is_some_and(|has| has == value),
        None => labels.contains_key(wanted),
    }
}

/// Formats the settings of a machine.
pub(crate) fn settings(machine: &MachineInfo) -> String {
    format!("name       {}\n", machine.name) + &fields(&setting_fields(&machine.settings))
}

fn setting_fields(settings: &MachineSettings) -> Vec<(&'static str, String)> {
    let autostart = match settings.autostart {
        Autostart::Off => "no".to_owned(),
        Autostart::On { order, delay_s: 0 } => format!("yes, order {order}"),
        Autostart::On { order, delay_s } => {
            format!("yes, order {order}, {delay_s} s before the next machine")
        }
    };
    let RestartRule { policy, limit } = settings.restart;
    let restart = match policy {
        RestartPolicy::No => "no".to_owned(),
        RestartPolicy::OnFailure => format!("on failure, at most {limit} in a row"),
        RestartPolicy::Always => format!("always, at most {limit} in a row"),
    };
    let labels: Vec<_> = settings.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let note = settings.note.replace('\n', "\n           ");
    vec![("autostart", autostart), ("restart", restart), ("labels", labels.join(" ")), ("note", note)]
}

/// Formats all details of a machine, a line each.
pub(crate) fn page(machine: &MachineInfo) -> String {
    let id = |capsule: &Option<whimbrel_core::CapsuleId>| capsule.map_or("none".to_owned(), |id| id.short());
    let accel = match machine.accel {
        Accel::Tcg => "translated",
        Accel::Kvm => "by the processor",
    };
    let mut lines = vec![
        ("name", machine.name.to_string()),
        ("state", format!("{}, since {}", state_of(machine), ago(machine.since_ms))),
        ("memory", machine.memory.to_string()),
        ("cpus", format!("{}, {}", machine.cpus, accel)),
        ("pid", machine.pid.map_or("none".to_owned(), |pid| pid.to_string())),
    ];
    let server = |it: &whimbrel_api::MachineProcess| format!("process {}, version {}", it.pid, it.version);
    lines.extend(machine.process.as_ref().map(|it| ("served by", server(it))));
    let disk = |disk: &whimbrel_api::DiskInfo| match disk.cdrom {
        true => ("cd-rom", format!("{}, {}", disk.size, disk.base)),
        false => ("disk", format!("{}, {} its own, over {}", disk.size, disk.owned, disk.base)),
    };
    lines.extend(machine.disks.iter().map(disk));
    let nic = |nic: &whimbrel_api::NicInfo| {
        let addresses = nic.addresses.iter().map(|address| format!(", {address}")).collect::<String>();
        format!("{} in {}{addresses}", nic.mac, nic.bridge.as_deref().unwrap_or("no bridge"))
    };
    let screen = || format!("shown by `whimbrel display {}`", machine.name);
    lines.extend(machine.display.then(|| ("screen", screen())));
    lines.extend(machine.nics.iter().map(|it| ("port", nic(it))));
    lines.extend([("made from", id(&machine.origin)), ("capsule", id(&machine.follows))]);
    lines.extend(machine.operation.map(|operation| ("operation", operation.to_string())));
    lines.extend(machine.vmgenid.clone().map(|guid| ("vmgenid", guid)));
    lines.extend(setting_fields(&machine.settings));
    let one = std::slice::from_ref(machine);
    fields(&lines) + &crate::protection_text::lines(one) + &care(machine)
}

/// Line about the upload of a machine's capsules, with the reason if it is stalled.
fn uploads(machine: &MachineInfo) -> Option<String> {
    let (name, uploads) = (&machine.name, machine.uploads.as_ref()?);
    let stalled = uploads.stalled.as_ref().map(|why| format!("; NOT THERE YET, will be retried: {why}"));
    Some(format!("{name}: capsules are uploaded to {}{}\n", uploads.to, stalled.unwrap_or_default()))
}

/// The first address of each port of a machine that has one.
fn addresses(machine: &MachineInfo) -> String {
    let first = machine.nics.iter().filter_map(|nic| nic.addresses.first());
    first.map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Bridges of a machine, and the other host if it uses a tunnel.
fn network(machine: &MachineInfo) -> String {
    let names: Vec<_> = machine.nics.iter().map(|nic| nic.bridge.as_deref().unwrap_or("-")).collect();
    let bridges = names.join(",");
    let Some(tunnel) = &machine.tunnel else { return bridges };
    let where_to = match (&machine.state, &tunnel.away) {
        (MachineState::Remote | MachineState::Suspended, Some(away)) => format!("{bridges} for {away}"),
        _ => format!("{bridges} of {}", tunnel.home),
    };
    match (tunnel.connected, &tunnel.reason) {
        (true, _) => where_to,
        (false, None) => format!("{where_to}, cut off"),
        (false, Some(reason)) => format!("{where_to}, cut off: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loading_machine_of_no_pages_is_no_division_by_zero() {
        let loading = |resident_pages, total_pages, stalled| {
            state(&MachineState::Loading { resident_pages, total_pages, stalled, from: None })
        };
        assert_eq!(loading(0, 0, None), "running, 0 % loaded");
        let stalled = loading(33, 100, Some("beta is away".into()));
        assert_eq!(stalled, "running, 33 % loaded, stalled: beta is away");
    }

    #[test]
    fn a_machine_between_two_hosts_says_which_has_what() {
        let from = Some("alpha".parse().expect("a name"));
        let loading = MachineState::Loading { resident_pages: 1, total_pages: 4, stalled: None, from };
        assert_eq!(state(&loading), "running, 25 % loaded, rest on alpha");
        let serving = |missing_pages, stalled| {
            state(&MachineState::ServingPages { to: "beta".parse().expect("a name"), missing_pages, stalled })
        };
        assert_eq!(serving(Some(512), None), "moved to beta, 2 MiB to send");
        assert_eq!(serving(None, Some("no route".into())), "moved to beta, stalled: no route");
    }
}

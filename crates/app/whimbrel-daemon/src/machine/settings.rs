//! Settings of machines: their bounds, and the request that changes them.

use crate::{core::error::DaemonError, daemon::Daemon};
use std::sync::Arc;
use whimbrel_api::{EventKind, MachineInfo, MachineSettings, SettingsRequest};
use whimbrel_core::MachineName;

const LABELS_MAX: usize = 64;
const KEY_MAX: usize = 63;
const VALUE_MAX: usize = 255;
const NOTE_MAX: usize = 4096;
const RESTARTS_MAX: u32 = 1000;
/// Longest delay between two machines that start with the host.
const DELAY_MAX_S: u32 = 3600;

impl Daemon {
    /// Changes settings of a machine, in whatever state it is, and its hardware.
    pub(crate) fn change_settings(
        self: &Arc<Self>,
        name: &MachineName,
        request: &SettingsRequest,
    ) -> Result<MachineInfo, DaemonError> {
        let machine = self.machines.get(name)?;
        if !request.hardware.is_empty() && self.protections.may_be_elsewhere(name) {
            return Err(DaemonError::invalid(format!(
                "{name} is protected, and its standby has the hardware of now: `whimbrel unprotect {name}` first"
            )));
        }
        {
            let mut turn = machine.try_lock_in_any_phase("change of settings", None)?;
            self.machines.check_current(&machine)?;
            let settings = changed(&turn.record.settings, request);
            check(&settings)?;
            self.change_hardware(&mut turn, &request.hardware, settings)?;
        }
        if request.restart.is_some() {
            // The new rule begins with a new row.
            self.self_starts.forget(name);
        }
        self.events.add(EventKind::Settings, name, "");
        Ok(machine.info())
    }
}

fn changed(before: &MachineSettings, request: &SettingsRequest) -> MachineSettings {
    let mut settings = before.clone();
    settings.autostart = request.autostart.unwrap_or(settings.autostart);
    settings.restart = request.restart.unwrap_or(settings.restart);
    settings.note = request.note.clone().unwrap_or(settings.note);
    for (key, value) in &request.labels {
        match value {
            Some(value) => drop(settings.labels.insert(key.clone(), value.clone())),
            None => drop(settings.labels.remove(key)),
        }
    }
    settings
}

/// Refuses settings that are out of bounds.
pub(crate) fn check(settings: &MachineSettings) -> Result<(), DaemonError> {
    let refuse = |reason: String| Err(DaemonError::invalid(reason));
    if settings.labels.len() > LABELS_MAX {
        return refuse(format!("a machine has at most {LABELS_MAX} labels"));
    }
    let of_key = |letter: char| letter.is_ascii_alphanumeric() || "._/-".contains(letter);
    for (key, value) in &settings.labels {
        if key.is_empty() || key.len() > KEY_MAX || !key.chars().all(of_key) {
            return refuse(format!(
                "{key:?} is no key of a label: use up to {KEY_MAX} letters, digits and . _ / -"
            ));
        }
        if value.len() > VALUE_MAX || value.chars().any(char::is_control) {
            return refuse(format!("the label {key} is longer than {VALUE_MAX} bytes or not one line"));
        }
    }
    if settings.note.len() > NOTE_MAX
        || settings.note.chars().any(|letter| letter.is_control() && letter != '\n')
    {
        return refuse(format!("a note is text of at most {NOTE_MAX} bytes"));
    }
    if !(1..=RESTARTS_MAX).contains(&settings.restart.limit) {
        return refuse(format!("the limit of restarts is from 1 to {RESTARTS_MAX}"));
    }
    match settings.autostart {
        whimbrel_api::Autostart::On { delay_s, .. } if delay_s > DELAY_MAX_S => {
            refuse(format!("the delay after a start is at most {DELAY_MAX_S} seconds"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use whimbrel_api::{Autostart, RestartPolicy, RestartRule};

    fn labelled(key: &str, value: &str) -> MachineSettings {
        let labels = BTreeMap::from([(key.to_owned(), value.to_owned())]);
        MachineSettings { labels, ..MachineSettings::default() }
    }

    #[test]
    fn what_is_absent_stays_and_null_removes_a_label() {
        let before = MachineSettings { note: "mine".into(), ..labelled("tier", "web") };
        let restart = Some(RestartRule { policy: RestartPolicy::Always, limit: 3 });
        let labels =
            BTreeMap::from([("tier".to_owned(), None), ("owner".to_owned(), Some("ann".to_owned()))]);
        let after = changed(&before, &SettingsRequest { restart, labels, ..SettingsRequest::default() });
        assert_eq!((after.note.as_str(), Some(after.restart)), ("mine", restart));
        assert_eq!(after.labels, labelled("owner", "ann").labels);
        assert_eq!(changed(&after, &SettingsRequest::default()), after);
    }

    #[test]
    fn settings_out_of_bounds_are_refused() {
        assert!(check(&labelled("k8s.io/app_1-x", "any text = fine")).is_ok());
        let refused = |settings: MachineSettings| check(&settings).is_err();
        assert!(refused(labelled("", "x")) && refused(labelled("a b", "x")));
        assert!(refused(labelled("a", "two\nlines")) && refused(labelled("a", &"x".repeat(256))));
        let many = (0..65).map(|number| (number.to_string(), String::new())).collect();
        assert!(refused(MachineSettings { labels: many, ..MachineSettings::default() }));
        assert!(refused(MachineSettings { note: "\u{1b}[2J".into(), ..MachineSettings::default() }));
        let restart = RestartRule { policy: RestartPolicy::Always, limit: 0 };
        assert!(refused(MachineSettings { restart, ..MachineSettings::default() }));
        let autostart = Autostart::On { order: 0, delay_s: 3601 };
        assert!(refused(MachineSettings { autostart, ..MachineSettings::default() }));
    }
}

//! CD-ROM drives whose media change while the machine runs.
//!
//! QEMU QMP Reference Manual, `blockdev-open-tray`, `blockdev-remove-medium`, `blockdev-insert-medium`,
//! `blockdev-close-tray`. A drive has the id of the disk that is its medium.

use super::{
    Qemu,
    hotplug::{HotplugError, RELEASE},
};
use crate::qmp::QmpError;
use serde_json::json;
use std::{
    thread,
    time::{Duration, Instant},
};

/// Interval of requests to open a tray that the guest has locked.
const TRAY_POLL: Duration = Duration::from_millis(250);

impl Qemu {
    /// Opens the tray of drive `index`. A guest that has locked it is asked to let go, unless by `force`.
    ///
    /// # Errors
    /// If the guest does not let go.
    pub fn open_tray(&self, index: usize, force: bool) -> Result<(), HotplugError> {
        let drive = json!({"id": format!("disk{index}"), "force": force});
        let deadline = Instant::now() + RELEASE;
        loop {
            // QEMU says of a locked tray that it is done when it has asked the guest.
            self.qmp.execute("blockdev-open-tray", drive.clone())?;
            match self.has_open_tray(index)? {
                true => return Ok(()),
                false if Instant::now() < deadline => thread::sleep(TRAY_POLL),
                false => return Err(HotplugError::Held),
            }
        }
    }

    fn has_open_tray(&self, index: usize) -> Result<bool, QmpError> {
        let answer = self.qmp.execute("query-block", json!({}))?;
        let malformed = || QmpError::Malformed { command: "query-block".into() };
        let drive = format!("disk{index}");
        let found = answer.as_array().ok_or_else(malformed)?.iter().find(|drives| drives["qdev"] == drive);
        found.and_then(|drive| drive["tray_open"].as_bool()).ok_or_else(malformed)
    }

    /// Closes the tray of drive `index`, with the medium that it has. A tray that is closed stays so.
    pub fn close_tray(&self, index: usize) -> Result<(), HotplugError> {
        self.qmp.execute("blockdev-close-tray", json!({"id": format!("disk{index}")}))?;
        Ok(())
    }

    /// Takes the medium out of the open tray of drive `index`.
    pub fn remove_medium(&self, index: usize) -> Result<(), HotplugError> {
        self.qmp.execute("blockdev-remove-medium", json!({"id": format!("disk{index}")}))?;
        self.forget_disk(index);
        Ok(())
    }

    /// Puts the medium whose NBD server is there now into the open tray of drive `index`, and closes the
    /// tray.
    pub fn insert_medium(&self, index: usize) -> Result<(), HotplugError> {
        let disk = format!("disk{index}");
        self.add_nodes(index, true)?;
        self.qmp.execute("blockdev-insert-medium", json!({"id": disk, "node-name": disk}))?;
        self.close_tray(index)
    }
}

//! Encryption of the store: what it is, sealing what is plain, another master key.

use crate::{
    core::{error::DaemonError, master_key, operations::ProgressReporter, refs},
    daemon::Daemon,
};
use std::sync::Arc;
use whimbrel_api::{KeyChangeRequest, Operation, OperationKind, OperationResult, StoreEncryption, Unit};
use whimbrel_core::ByteSize;
use whimbrel_store::{Encryption, GcRoots};

impl Daemon {
    /// How the store is encrypted.
    pub(crate) fn encryption(&self) -> Result<StoreEncryption, DaemonError> {
        let found = self.store.encryption().map_err(refs::store_error("read its keys"))?;
        Ok(match found {
            None => {
                StoreEncryption { master_key: None, data_key: None, plain: ByteSize(self.stored_bytes()) }
            }
            Some(Encryption { master, data, plain }) => StoreEncryption {
                master_key: Some(master.to_string()),
                data_key: Some(data.to_string()),
                plain,
            },
        })
    }

    /// Seals what was written before the store was encrypted.
    pub(crate) fn seal(self: &Arc<Self>) -> Operation {
        let host = self.clone();
        self.operations().start(OperationKind::Seal, "the store", move |reporter| {
            host.machines.unreadable.check_none()?;
            let needed = host.needed_capsules();
            let report = host.store.seal_rest(GcRoots::Referenced, &needed, sealing(reporter));
            let left = "what was sealed so far stays sealed, and the store is complete";
            let report = report.map_err(refs::cancellable("encrypt its content", left))?;
            Ok(OperationResult::Seal { sealed: report.removed, plain: report.left })
        })
    }

    /// Wraps the data key of the store with the master key in a file.
    pub(crate) fn change_master_key(
        &self,
        request: &KeyChangeRequest,
    ) -> Result<StoreEncryption, DaemonError> {
        if !request.key_file.is_absolute() {
            return Err(DaemonError::invalid("the path of the key has to be absolute"));
        }
        let key = master_key::read_file(&request.key_file, self.directories.data())?;
        self.store.change_master_key(&key).map_err(refs::store_error("change the master key"))?;
        self.set_master_key(key.clone());
        tracing::warn!(
            master = %key.id(),
            file = %request.key_file.display(),
            "the store has another master key, with which this daemon has to be started next time"
        );
        self.encryption()
    }
}

fn sealing(reporter: &ProgressReporter) -> impl FnMut(u64, u64) -> bool {
    |done, total| {
        reporter.progress("encrypting", Unit::Bytes, done, Some(total));
        !reporter.is_cancelled()
    }
}

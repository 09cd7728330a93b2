//! Leases along with answers and changes of a session: what an answer says is leased, and what others have
//! leased is recalled before it is changed.

use super::{
    exports::{ExportTree, attr_in, attr_of},
    lease_table::HolderId,
    leases::{Leases, without_leases},
    sessions::ServedSession,
};
use crate::proto::{Attr, Claim, Entry, Ident, Op, RelPath, Return};
use std::{os::fd::OwnedFd, sync::Arc};
use whimbrel_wire::Refusal;

/// Leases that an answer grants once it is complete. To be made before anything of it is read.
pub(super) struct Granting {
    leases: Arc<Leases>,
    holder: Option<HolderId>,
    moment: u64,
    files: Vec<Ident>,
}

impl Drop for Granting {
    fn drop(&mut self) {
        if let Some(holder) = self.holder.filter(|_| !self.files.is_empty()) {
            self.leases.grant(holder, &self.files, self.moment);
        }
    }
}

impl Granting {
    /// The names of a directory are read next.
    pub(super) fn dir(&mut self, dir: &OwnedFd) -> Result<(), Refusal> {
        if self.holder.is_some() {
            let ident = attr_of(dir)?.ident;
            self.leases.cover_dir(dir, &ident);
            self.files.push(ident);
        }
        Ok(())
    }

    /// Entries of such a directory. What was not watched before is examined again.
    pub(super) fn entries(&mut self, dir: &OwnedFd, entries: &mut [Entry]) {
        if self.holder.is_none() {
            return;
        }
        for Entry { name, attr } in entries {
            if self.leases.cover(dir, name.as_os(), attr)
                && let Ok(now) = attr_in(dir, name)
            {
                *attr = now;
            }
            self.files.push(attr.ident);
        }
    }

    /// Content of a file that was read with these attributes. It is leased only if they are still so.
    pub(super) fn content(&mut self, tree: &ExportTree, path: &RelPath, attr: &Attr) {
        let now = self.file(tree, path, Some(*attr));
        if !now.is_ok_and(|now| now.is_some_and(|now| now == *attr)) {
            self.files.clear();
        }
    }

    /// The attributes of one file, which may be watched only from now on.
    pub(super) fn file(
        &mut self,
        tree: &ExportTree,
        path: &RelPath,
        attr: Option<Attr>,
    ) -> Result<Option<Attr>, Refusal> {
        let (Some(holder), Some(found)) = (self.holder, attr) else { return Ok(attr) };
        if self.leases.holds(holder, &found.ident) {
            return Ok(attr);
        }
        let new = match path.split() {
            None => self.leases.cover_dir(tree.dir(path)?, &found.ident),
            Some((parent, name)) => {
                let dir = tree.dir(&parent)?;
                let above = self.leases.cover_dir(&dir, &attr_of(&dir)?.ident);
                self.leases.cover(&dir, name.as_os(), &found) || above
            }
        };
        let attr = if new { tree.attr(path)? } else { attr };
        self.files.extend(attr.map(|attr| attr.ident));
        Ok(attr)
    }
}

impl ServedSession {
    pub(super) fn granting(&self) -> Granting {
        let leases = self.leases.clone();
        Granting { moment: leases.moment(), leases, holder: self.holder, files: Vec::new() }
    }

    /// Waits for changes of others that they have not sent yet.
    pub(super) fn before_read(&self, files: &[Ident]) -> Result<(), Refusal> {
        self.leases.before_read(self.holder, files)
    }

    /// Makes a change once nobody else has a lease of what it changes; `files` finds that.
    pub(super) fn change<T>(
        &self,
        files: impl FnOnce() -> Vec<Ident>,
        change: impl FnOnce() -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let (arrivals, alone) = (self.leases.arrivals(), self.leases.is_alone(self.holder));
        let files = if alone { Vec::new() } else { files() };
        self.leases.before_change(self.holder, &files)?;
        let done = change();
        match alone {
            true if self.leases.arrivals() == arrivals => {}
            // Somebody came meanwhile, and may have seen the state before.
            true => self.leases.start_all_anew(self.holder),
            false => self.leases.changed(self.holder, &files),
        }
        done
    }

    /// Files and directories that a change of names or attributes affects.
    pub(super) fn touched(&self, op: &Op) -> Vec<Ident> {
        let op = op.plain();
        let names = op.attr_change().is_none();
        let mut files = Vec::new();
        for path in op.from_path().into_iter().chain([op.path()]) {
            let above = path.split().map(|(parent, _)| parent).filter(|_| names);
            let found = above.into_iter().chain([path.clone()]).filter_map(|path| self.tree.attr(&path).ok());
            files.extend(found.flatten().map(|attr| attr.ident));
        }
        files.sort_unstable();
        files.dedup();
        files
    }

    pub(super) fn returned(&self, Return { generation, files }: &Return) -> Result<(), Refusal> {
        self.leases.returned(self.holder.ok_or_else(without_leases)?, *generation, files);
        Ok(())
    }

    pub(super) fn claim(&self, Claim { generation, files }: &Claim) -> Result<(), Refusal> {
        self.leases.claim(self.holder.ok_or_else(without_leases)?, *generation, files);
        Ok(())
    }

    /// Ends the leases of a session that is over.
    pub(super) fn leave(&self) {
        if let Some(holder) = self.holder {
            self.leases.leave(holder);
        }
    }
}

impl Drop for ServedSession {
    fn drop(&mut self) {
        self.leave();
    }
}

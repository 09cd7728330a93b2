//! Small files that somebody else has changed: attributes and content come with one answer.

use crate::client::session::Core;
use crate::proto::{Range, Read, ReadCall, ReadDone, unpack_pages};
use std::time::Instant;

impl Core {
    /// Asks for a small file whose lease was recalled; false if that must be done in another way.
    pub(in crate::client) fn reread(&self, id: u64) -> bool {
        let (file, ident) = {
            let nodes = self.inodes();
            match nodes.get(id).filter(|node| node.recalled && !node.local) {
                Some(node) => (node.file, node.attr.ident),
                None => return false,
            }
        };
        let block = self.cache.block_size();
        let clean = |file| self.cache.file(file).is_some_and(|record| !record.dirty && record.size <= block);
        let source = file.filter(|file| clean(*file)).and_then(|file| self.fetch_subject(id, file));
        let Some(source) = source else { return false };
        let (range, level) = (Range { offset: 0, len: block as u32 }, self.connection.compression_level());
        let asked = Instant::now();
        let read = Read { file: source.file_ref.clone(), range, level };
        let Ok((ReadDone { attr, pages }, packed)) = self.connection.call::<ReadCall, _>(read) else {
            return false;
        };
        let Ok(content) = unpack_pages(&pages, &packed, block as usize) else { return false };
        if attr.ident != ident {
            return false;
        }
        self.store_attr(id, attr, asked);
        let here = self.cache.file(source.file).is_some_and(|record| record.base == attr.version());
        if let (true, Some(epoch)) = (here, self.cache.epoch(source.file))
            && let Err(error) = self.cache.fill(source.file, epoch, 0, &content)
        {
            tracing::debug!(%error, "cannot store what was read again");
        }
        true
    }
}

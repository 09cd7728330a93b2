//! Whoever may have a page of a given digest: the store, the hash cache, whatever a caller adds.

use crate::HashCache;
use std::{fmt, sync::Arc};
use whimbrel_core::{Digest, PAGE_SIZE};

/// Something that can be asked for a page by its digest. What it gives has been checked against the digest.
pub trait Holder: Send + Sync {
    /// The page, if it is here.
    fn page(&self, digest: &Digest) -> Option<[u8; PAGE_SIZE]>;
}

impl<F> Holder for F
where
    F: Fn(&Digest) -> Option<[u8; PAGE_SIZE]> + Send + Sync,
{
    fn page(&self, digest: &Digest) -> Option<[u8; PAGE_SIZE]> {
        self(digest)
    }
}

impl Holder for HashCache {
    fn page(&self, digest: &Digest) -> Option<[u8; PAGE_SIZE]> {
        let mut page = [0; PAGE_SIZE];
        self.get(digest, &mut page).then_some(page)
    }
}

/// Holders in the order in which they are asked: the cheapest first.
#[derive(Default)]
pub struct Holders(Vec<Box<dyn Holder>>);

impl Holders {
    /// Adds one behind the others.
    pub fn push(&mut self, holder: impl Holder + 'static) {
        self.0.push(Box::new(holder));
    }
}

impl Holder for Holders {
    fn page(&self, digest: &Digest) -> Option<[u8; PAGE_SIZE]> {
        self.0.iter().find_map(|holder| holder.page(digest))
    }
}

impl<T: Holder + ?Sized> Holder for Arc<T> {
    fn page(&self, digest: &Digest) -> Option<[u8; PAGE_SIZE]> {
        (**self).page(digest)
    }
}

impl fmt::Debug for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Holders({})", self.0.len())
    }
}

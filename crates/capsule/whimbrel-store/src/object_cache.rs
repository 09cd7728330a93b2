//! Object cache: recently read frames and tree nodes, decoded, bounded in bytes.
//!
//! Sixteen shards, each with the clock algorithm: an entry that was used since the hand last passed stays for
//! another round. A shard is locked for a map access only, never while a frame is read or decoded; two
//! threads may decode one frame at once.

use std::{
    collections::{HashMap, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Mutex},
};

const SHARDS: usize = 16;

pub(crate) trait Weight {
    /// Bytes that it occupies.
    fn weight(&self) -> usize;
}

struct Slot<V> {
    value: Arc<V>,
    used: bool,
}

struct Shard<K, V> {
    slots: HashMap<K, Slot<V>>,
    hand: VecDeque<K>,
    bytes: usize,
}

/// Map with a size limit.
pub(crate) struct Cache<K, V> {
    shards: Vec<Mutex<Shard<K, V>>>,
    limit: usize,
}

impl<K: Copy + Eq + Hash, V: Weight> Cache<K, V> {
    /// Creates a cache of at most `bytes`; it always retains the newest value.
    pub(crate) fn new(bytes: usize) -> Self {
        let shard = || Mutex::new(Shard { slots: HashMap::new(), hand: VecDeque::new(), bytes: 0 });
        Self { shards: (0..SHARDS).map(|_| shard()).collect(), limit: bytes / SHARDS }
    }

    fn shard(&self, key: &K) -> std::sync::MutexGuard<'_, Shard<K, V>> {
        let mut hash = DefaultHasher::new();
        key.hash(&mut hash);
        self.shards[hash.finish() as usize % SHARDS].lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn get(&self, key: &K) -> Option<Arc<V>> {
        let mut shard = self.shard(key);
        let slot = shard.slots.get_mut(key)?;
        slot.used = true;
        Some(slot.value.clone())
    }

    pub(crate) fn insert(&self, key: K, value: Arc<V>) {
        let mut shard = self.shard(&key);
        let shard = &mut *shard;
        shard.bytes += value.weight();
        match shard.slots.insert(key, Slot { value, used: false }) {
            Some(old) => shard.bytes -= old.value.weight(),
            None => shard.hand.push_back(key),
        }
        while shard.bytes > self.limit && shard.hand.len() > 1 {
            let Some(oldest) = shard.hand.pop_front() else { return };
            match shard.slots.get_mut(&oldest) {
                Some(slot) if slot.used => {
                    slot.used = false;
                    shard.hand.push_back(oldest);
                }
                _ => shard.bytes -= shard.slots.remove(&oldest).map_or(0, |slot| slot.value.weight()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Block(usize);

    impl Weight for Block {
        fn weight(&self) -> usize {
            self.0
        }
    }

    #[test]
    fn the_cache_stays_within_its_bytes_and_keeps_what_is_used() {
        let cache = Cache::new(16 * 1000);
        cache.insert(u64::MAX, Arc::new(Block(10)));
        for key in 0..10_000u64 {
            cache.insert(key, Arc::new(Block(100)));
            assert!(cache.get(&u64::MAX).is_some(), "used all the time, dropped at {key}");
        }
        let bytes: usize = cache.shards.iter().map(|s| s.lock().unwrap().bytes).sum();
        assert!((1000..=16_000).contains(&bytes), "{bytes}");
    }
}

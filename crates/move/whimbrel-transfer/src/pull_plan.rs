//! Pull plan: the state machine that decides what a pull requests next, from which holder, and how much.
//! Pure: events in, actions out, time is a number.
//!
//! An item is requested from the nearest holder that is up and may have it; from a farther one only while
//! that one is down, or lacks it. Requests go out until the link of a holder has its window in flight, each
//! as large as one reply should be, and none while a machine waits for a page (`demand`). What is lost with a
//! link is requested again. Nothing is requested twice at a time, and nothing any more from a holder that
//! sent wrong data.

use crate::{ChildSet, protocol::*};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};
use whimbrel_core::Digest;

const RETRY_MAX: Duration = Duration::from_secs(10);
/// Time after which the next holder is dialled too (RFC 8305, section 5).
const HEAD_START: Duration = Duration::from_millis(250);
/// First estimate of the bytes that a leaf's differing pages take; items that may take several replies are
/// split.
const LEAF_BYTES_INITIAL: f64 = 2000.0;
const PAGE_BYTES_INITIAL: f64 = 1500.0;
const DELTA_PAGE_BYTES: u64 = 300;

/// Item to be fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FetchItem {
    /// One complete object.
    Object(ObjectKind, WantedObject),
    /// Rest of a blob of `total` bytes from `offset` on.
    BlobRange {
        /// Digest of the blob.
        digest: Digest,
        /// Bytes that are here already.
        offset: u64,
        /// Length of the blob.
        total: u64,
    },
    /// Differing pages of leaves under a node.
    Children {
        /// Digest of the node.
        node: Digest,
        /// Digest of the older node.
        similar: Digest,
        /// Leaves that are requested.
        children: ChildSet,
    },
    /// Differing pages of one leaf.
    Leaf {
        /// Digest of the leaf.
        leaf: Digest,
        /// Digest of the older leaf.
        similar: Digest,
    },
    /// Pages of a leaf that is known.
    Pages {
        /// Digest of the leaf.
        leaf: Digest,
        /// Digest of an older leaf.
        similar: Option<Digest>,
        /// Slots of the pages.
        slots: ChildSet,
    },
}

/// Item and the holders that are known to lack it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queued {
    /// Item to be fetched.
    pub item: FetchItem,
    /// Bit `i`: holder `i` lacks it.
    pub lacked_by: u64,
}

/// Request to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchRequest {
    /// Number of the request.
    pub ticket: u64,
    /// Index of the holder.
    pub peer: usize,
    /// Requested items, all of one kind.
    pub items: Vec<Queued>,
    /// Bytes that the reply should have.
    pub max_bytes: u64,
}

/// Next action of a pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send this request.
    Request(FetchRequest),
    /// Connect to a holder, and report that it is being dialled, up or down.
    Dial(usize),
    /// Wait until a holder that is being dialled is up or down, and report it.
    AwaitDial,
    /// Wait for the reply to this request.
    Wait(u64),
    /// Nothing can be done before this time; call again then.
    Sleep(Duration),
    /// No holder has this item.
    NoHolder(FetchItem),
    /// Everything has arrived.
    Done,
}

/// Limits of a link, from measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of replies that may be in flight.
    pub window: u64,
    /// Bytes of one reply.
    pub answer: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HolderState {
    Down {
        until: Duration,
        wait: Duration,
    },
    /// Being dialled; the next wait, if that fails.
    Dialling {
        since: Duration,
        wait: Duration,
    },
    Up,
    Blamed,
}

#[derive(Debug)]
struct InFlight {
    peer: usize,
    items: Vec<Queued>,
    bytes: u64,
}

/// State of a pull.
#[derive(Debug)]
pub struct PullPlan {
    objects: VecDeque<Queued>,
    pages: VecDeque<Queued>,
    flights: BTreeMap<u64, InFlight>,
    peers: Vec<(HolderState, Limits)>,
    tickets: u64,
    retry: Duration,
    leaf_bytes: f64,
    page_bytes: f64,
    /// Whether a running machine waits for a page.
    pub demand: bool,
}

impl PullPlan {
    /// Plan without items for `peers` holders, nearest first. Holders that do not answer are dialled again
    /// after `retry`, then after ever longer times.
    pub fn new(peers: usize, limits: Limits, retry: Duration) -> Self {
        let fresh = HolderState::Down { until: Duration::ZERO, wait: Duration::ZERO };
        Self {
            objects: VecDeque::new(),
            pages: VecDeque::new(),
            flights: BTreeMap::new(),
            peers: vec![(fresh, limits); peers.min(crate::holders::HOLDERS_MAX)],
            tickets: 0,
            leaf_bytes: LEAF_BYTES_INITIAL,
            page_bytes: PAGE_BYTES_INITIAL,
            retry,
            demand: false,
        }
    }

    /// Adds an item to fetch.
    pub fn want(&mut self, item: FetchItem) {
        let queued = Queued { item, lacked_by: 0 };
        self.queue_of(&queued.item).push_back(queued);
    }

    fn queue_of(&mut self, item: &FetchItem) -> &mut VecDeque<Queued> {
        match item {
            FetchItem::Object(..) | FetchItem::BlobRange { .. } => &mut self.objects,
            FetchItem::Children { .. } | FetchItem::Leaf { .. } | FetchItem::Pages { .. } => &mut self.pages,
        }
    }

    /// Reports that a holder is connected.
    pub fn up(&mut self, peer: usize) {
        if self.peers[peer].0 != HolderState::Blamed {
            self.peers[peer].0 = HolderState::Up;
        }
    }

    /// Reports that a holder is being dialled. Meanwhile farther ones are asked.
    pub fn dialling(&mut self, peer: usize, now: Duration) {
        let wait = match self.peers[peer].0 {
            HolderState::Down { wait, .. } => (wait * 2).clamp(self.retry, RETRY_MAX),
            HolderState::Up => self.retry,
            HolderState::Dialling { .. } | HolderState::Blamed => return,
        };
        self.peers[peer].0 = HolderState::Dialling { since: now, wait };
    }

    /// Holders that are being dialled.
    pub fn dialled(&self) -> impl Iterator<Item = usize> {
        let peers = self.peers.iter().enumerate();
        peers.filter(|(_, (state, _))| matches!(state, HolderState::Dialling { .. })).map(|(peer, _)| peer)
    }

    /// Reports that a holder cannot be reached, or that its link is lost.
    pub fn down(&mut self, peer: usize, now: Duration) {
        let wait = match self.peers[peer].0 {
            HolderState::Dialling { wait, .. } => wait,
            // Several requests that were lost with one link report it each.
            HolderState::Down { until, .. } if until > now => return,
            HolderState::Down { wait, .. } => (wait * 2).clamp(self.retry, RETRY_MAX),
            HolderState::Up => self.retry,
            HolderState::Blamed => return,
        };
        self.peers[peer].0 = HolderState::Down { until: now + wait, wait };
    }

    /// Reports that a holder sent wrong data.
    pub fn blamed(&mut self, peer: usize) {
        self.peers[peer].0 = HolderState::Blamed;
    }

    /// Sets the limits of the link to a holder.
    pub fn measured(&mut self, peer: usize, limits: Limits) {
        self.peers[peer].1 = limits;
    }

    /// Reports a reply. `left` are the items that it did not have, `lacking` those that the peer says it
    /// lacks.
    pub fn answered(&mut self, ticket: u64, left: Vec<FetchItem>, lacking: Vec<FetchItem>) {
        let Some(flight) = self.flights.remove(&ticket) else { return };
        let before = flight.items.iter().fold(0, |all, queued| all | queued.lacked_by);
        for (items, lacked_by) in [(left, before), (lacking, before | 1 << flight.peer)] {
            for item in items.into_iter().rev() {
                self.queue_of(&item).push_front(Queued { item, lacked_by });
            }
        }
    }

    /// Reports a request without a reply: all of it is requested again.
    pub fn unanswered(&mut self, ticket: u64) {
        let Some(flight) = self.flights.remove(&ticket) else { return };
        for queued in flight.items.into_iter().rev() {
            self.queue_of(&queued.item).push_front(queued);
        }
    }

    /// Records the bytes that differing pages of leaves took, to estimate the next ones.
    pub fn record_leaf_bytes(&mut self, leaves: usize, bytes: usize) {
        update_average(&mut self.leaf_bytes, leaves, bytes);
    }

    /// Records the bytes that pages of known leaves took, to estimate the next ones.
    pub fn record_page_bytes(&mut self, pages: usize, bytes: usize) {
        update_average(&mut self.page_bytes, pages, bytes);
    }

    /// Estimated bytes still to receive, for what is known to be missing.
    pub fn bytes_left(&self) -> u64 {
        let queued = self.objects.iter().chain(&self.pages);
        queued.map(|queued| self.estimate(&queued.item)).sum::<u64>()
            + self.flights.values().map(|flight| flight.bytes).sum::<u64>()
    }

    /// Item that is wanted first.
    pub fn first(&self) -> Option<&FetchItem> {
        self.objects.front().or(self.pages.front()).map(|queued| &queued.item)
    }

    /// Estimated bytes of replies in flight from a holder.
    pub fn bytes_in_flight(&self, peer: usize) -> u64 {
        self.flights.values().filter(|flight| flight.peer == peer).map(|flight| flight.bytes).sum()
    }

    fn estimate(&self, item: &FetchItem) -> u64 {
        match item {
            FetchItem::Object(ObjectKind::Manifest, _) => 2 << 10,
            FetchItem::Object(ObjectKind::Node, want) => {
                if want.similar.is_some() {
                    300
                } else {
                    5 << 10
                }
            }
            FetchItem::Object(ObjectKind::ShortLeaf, _) => 3 << 10,
            FetchItem::Object(ObjectKind::Blob, want) => {
                if want.similar.is_some() {
                    8 << 10
                } else {
                    32 << 10
                }
            }
            FetchItem::BlobRange { offset, total, .. } => (total - offset) / 2,
            FetchItem::Children { children, .. } => (children.len() as f64 * self.leaf_bytes) as u64,
            FetchItem::Leaf { .. } => self.leaf_bytes as u64,
            FetchItem::Pages { slots, similar: None, .. } => (slots.len() as f64 * self.page_bytes) as u64,
            FetchItem::Pages { slots, .. } => slots.len() as u64 * DELTA_PAGE_BYTES,
        }
    }

    /// Next action. Called again after every event and every action carried out.
    pub fn next(&mut self, now: Duration) -> Action {
        if let Some(peer) = self.to_dial(now) {
            // The caller reports `dialling`, `up` or `down` before it calls again.
            return Action::Dial(peer);
        }
        if !self.demand
            && let Some(ask) = self.next_request()
        {
            return Action::Request(ask);
        }
        if let Some(ticket) = self.flights.keys().next() {
            return Action::Wait(*ticket);
        }
        if self.objects.is_empty() && self.pages.is_empty() {
            return Action::Done;
        }
        let stuck = self.objects.iter().chain(&self.pages).find(|queued| !self.has_holder(queued));
        match stuck {
            Some(queued) => Action::NoHolder(queued.item.clone()),
            None if !self.demand && self.dialled().next().is_some() => Action::AwaitDial,
            None => Action::Sleep(self.wake_time(now)),
        }
    }

    /// Holder that should be dialled: the nearest that may have the first item, once its time has come.
    fn to_dial(&self, now: Duration) -> Option<usize> {
        let first = self.objects.front().or(self.pages.front())?;
        for (peer, (state, _)) in self.peers.iter().enumerate() {
            match state {
                _ if first.lacked_by >> peer & 1 == 1 => {}
                HolderState::Down { until, .. } if *until <= now => return Some(peer),
                HolderState::Up => return None,
                HolderState::Dialling { since, .. } if now < *since + HEAD_START => return None,
                HolderState::Down { .. } | HolderState::Dialling { .. } | HolderState::Blamed => {}
            }
        }
        None
    }

    fn has_holder(&self, queued: &Queued) -> bool {
        let mut peers = self.peers.iter().enumerate();
        peers.any(|(peer, (state, _))| *state != HolderState::Blamed && queued.lacked_by >> peer & 1 == 0)
    }

    fn wake_time(&self, now: Duration) -> Duration {
        let until = self.peers.iter().filter_map(|(peer, _)| match peer {
            HolderState::Down { until, .. } => Some(*until),
            HolderState::Dialling { .. } | HolderState::Up | HolderState::Blamed => None,
        });
        let soon = now + Duration::from_millis(20).min(self.retry);
        until.min().filter(|_| !self.demand).unwrap_or(soon).max(soon)
    }

    fn holder(&self, queued: &Queued) -> Option<usize> {
        let mut peers = self.peers.iter().enumerate();
        peers
            .find(|(peer, (state, _))| *state == HolderState::Up && queued.lacked_by >> peer & 1 == 0)
            .map(|(peer, _)| peer)
    }

    fn next_request(&mut self) -> Option<FetchRequest> {
        let enough = self.pages.iter().map(|queued| self.estimate(&queued.item)).take(64).sum::<u64>();
        let most = self.peers.iter().map(|(_, limits)| limits.answer).max()?;
        // Nodes first, because they show what else is needed; but only while there are too few pages to keep
        // the link busy.
        let order = if enough > 4 * most { [false, true] } else { [true, false] };
        order.into_iter().find_map(|objects| self.request_from_queue(objects))
    }

    fn request_from_queue(&mut self, objects: bool) -> Option<FetchRequest> {
        let queue = if objects { &self.objects } else { &self.pages };
        let first = queue.iter().position(|queued| self.holder(queued).is_some())?;
        let peer = self.holder(&queue[first])?;
        let limits = self.peers[peer].1;
        let under_way = self.bytes_in_flight(peer);
        if under_way > 0 && under_way + limits.answer > limits.window {
            return None;
        }
        let (items, bytes) = self.take(objects, first, limits.answer);
        self.tickets += 1;
        let flight = InFlight { peer, items: items.clone(), bytes };
        self.flights.insert(self.tickets, flight);
        Some(FetchRequest { ticket: self.tickets, peer, items, max_bytes: limits.answer })
    }

    /// Takes items of one kind for one reply of about `room` bytes, the last of them split to fit.
    fn take(&mut self, objects: bool, first: usize, room: u64) -> (Vec<Queued>, u64) {
        let (mut items, mut bytes) = (Vec::<Queued>::new(), 0);
        loop {
            let queue = if objects { &self.objects } else { &self.pages };
            let Some(next) = queue.get(first) else { break };
            let fits = items.first().is_none_or(|one| {
                one.lacked_by == next.lacked_by
                    && may_share_request(&one.item, &next.item)
                    && bytes < room
                    && items.len() < WANTS_MAX
            });
            if !fits {
                break;
            }
            let (part, rest) = self.split(next, room.saturating_sub(bytes));
            bytes += self.estimate(&part.item).max(1);
            items.push(part);
            let queue = if objects { &mut self.objects } else { &mut self.pages };
            match rest {
                Some(rest) => queue[first] = rest,
                None => drop(queue.remove(first)),
            }
        }
        (items, bytes)
    }

    /// Part of an item that fits `room` bytes, at least a page or a leaf of it, and the rest.
    fn split(&self, queued: &Queued, room: u64) -> (Queued, Option<Queued>) {
        let lacked_by = queued.lacked_by;
        let pair = |part: FetchItem, rest: Option<FetchItem>| {
            (Queued { item: part, lacked_by }, rest.map(|item| Queued { item, lacked_by }))
        };
        match &queued.item {
            FetchItem::Children { node, similar, children } => {
                let count = ((room as f64 / self.leaf_bytes) as usize).max(1);
                let make = |children| FetchItem::Children { node: *node, similar: *similar, children };
                let part = children.first(count);
                let rest = children.without(&part);
                pair(make(part), (!rest.is_empty()).then(|| make(rest)))
            }
            FetchItem::Pages { leaf, similar, slots } => {
                let each = if similar.is_some() { DELTA_PAGE_BYTES as f64 } else { self.page_bytes };
                let part = slots.first(((room as f64 / each) as usize).max(1));
                let make = |slots| FetchItem::Pages { leaf: *leaf, similar: *similar, slots };
                let rest = slots.without(&part);
                pair(make(part), (!rest.is_empty()).then(|| make(rest)))
            }
            other => pair(other.clone(), None),
        }
    }
}

/// Whether two items may share a request.
fn may_share_request(a: &FetchItem, b: &FetchItem) -> bool {
    match (a, b) {
        (FetchItem::Object(a, _), FetchItem::Object(b, _)) => a == b,
        (FetchItem::BlobRange { .. }, _) | (_, FetchItem::BlobRange { .. }) => false,
        (FetchItem::Object(..), _) | (_, FetchItem::Object(..)) => false,
        // Pages against older ones and pages without want different compression levels.
        (FetchItem::Pages { similar: None, .. }, b) => matches!(b, FetchItem::Pages { similar: None, .. }),
        (_, FetchItem::Pages { similar: None, .. }) => false,
        _ => true,
    }
}

fn update_average(known: &mut f64, count: usize, bytes: usize) {
    if count > 0 {
        *known = (*known * 0.5 + bytes as f64 / count as f64 * 0.5).max(16.0);
    }
}

#[cfg(test)]
#[path = "pull_plan_tests.rs"]
mod tests;

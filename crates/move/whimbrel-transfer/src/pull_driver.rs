//! Pull driver: carries out the actions of a pull plan, with the links, the clock and the local objects of a
//! pull.
//!
//! One thread, which also decodes; requests overlap. What arrives is stored at once if it has the requested
//! digest. A holder that sends anything else is blamed, and its requests go to another one.

use crate::{
    BASES_MAX, BaseImage, Holders, Link, LinkError, LocalObjects, PageLookup, TransferError,
    answer_decoder::{
        ReceivedLeaf, ReceivedObject, ReceivedPages, RequestedLeaf, RequestedSlots, decode_blob_range,
        decode_leaf_pages, decode_objects,
    },
    holders::Reach,
    link::Answer,
    protocol::*,
    pull::{Options, Progress, Report},
    pull_plan::{Action, FetchItem, FetchRequest, Limits, PullPlan},
    request_builder::{blob_range_request, request},
    tree_walk::TreeWalk,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_image::{Manifest, pack_frame::Kind};
use whimbrel_wire::{Call, HEAD_SIZE, Refusal, Reply};

/// Link rate in bytes a second above which similar pages are not looked for: 200 Mbit/s.
const BASES_RATE: u64 = 25_000_000;
/// Least seconds for the rest at which the search pays: a sketch of a disk takes about one.
const BASES_SECONDS: u64 = 2;
/// Time after which the measured rate of a link is used.
const MEASURED_AFTER: Duration = Duration::from_millis(500);

/// Interval at which a request that a machine waits for is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Longest wait before a cancel is seen.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

struct InFlight {
    ask: FetchRequest,
    link: Arc<dyn Link>,
    answer: Box<dyn Answer>,
    started: Instant,
    /// Base images that the request named.
    bases: Vec<BaseImage>,
}

/// State of a running pull.
pub(crate) struct PullDriver<'a> {
    pub(crate) walk: TreeWalk<'a>,
    holders: &'a Holders,
    /// Whether a machine waits for this: it goes before prefetching, and fails rather than wait.
    pub(crate) urgent: bool,
    /// Whether it waits for a holder from which nothing arrives, as no other has what is wanted.
    patient: bool,
    flights: BTreeMap<u64, InFlight>,
    blobs: HashMap<Digest, Vec<u8>>,
    /// Images that are complete here and probably resemble what is wanted.
    base_images: Vec<BaseImage>,
    pub(crate) report: Report,
    started: Instant,
    last_reply: Instant,
    /// Last refusal of a holder that may answer later.
    refused: Option<LinkError>,
}

/// Limits of prefetching from a holder.
fn limits(sources: &Holders, peer: usize) -> Limits {
    match peer < sources.len() {
        true => sources.meter(peer).limits(sources.serves_machine()),
        false => Limits { window: 0, answer: 0 },
    }
}

impl<'a> PullDriver<'a> {
    pub(crate) fn new(
        shelf: &'a dyn LocalObjects,
        holders: &'a Holders,
        lookups: &'a [&'a dyn PageLookup],
    ) -> Self {
        Self {
            walk: TreeWalk::new(
                shelf,
                lookups,
                PullPlan::new(holders.len(), limits(holders, 0), holders.retry()),
            ),
            holders,
            urgent: false,
            patient: false,
            flights: BTreeMap::new(),
            blobs: HashMap::new(),
            base_images: Vec::new(),
            report: Report::default(),
            started: Instant::now(),
            last_reply: Instant::now(),
            refused: None,
        }
    }

    /// Fetches the manifest of a capsule, unless it is here.
    pub(crate) fn manifest(&mut self, id: CapsuleId, options: &mut Options<'_>) -> Result<(), TransferError> {
        if self.walk.local.object(&id.0).is_some() {
            return Ok(());
        }
        let want = WantedObject { digest: id.0, similar: None };
        self.walk.plan.want(FetchItem::Object(ObjectKind::Manifest, want));
        self.run_with(options)
    }

    /// Fetches all objects of a capsule whose manifest is here.
    pub(crate) fn capsule(&mut self, id: CapsuleId, options: &mut Options<'_>) -> Result<(), TransferError> {
        let no_manifest = || self.holders.no_holder_error(id.0, None);
        let bytes = self.walk.local.object(&id.0).ok_or_else(no_manifest)?;
        let manifest =
            Manifest::decode(&bytes).map_err(|source| TransferError::Manifest { capsule: id, source })?;
        let bases = self.bases(&id, &options.bases);
        let whole = bases.iter().filter(|(_, whole)| *whole).flat_map(|(base, _)| &base.images);
        let images = whole.filter_map(|image| Some(BaseImage { root: image.root?, pages: image.pages }));
        self.base_images = images.take(BASES_MAX).collect();
        self.walk.capsule(&manifest, &bases)?;
        self.run_with(options)
    }

    fn run_with(&mut self, options: &mut Options<'_>) -> Result<(), TransferError> {
        let mut each = |driver: &Self| {
            (options.progress)(&driver.progress());
            match options.cancel.load(Ordering::Acquire) {
                true => Err(TransferError::Cancelled),
                false => Ok(()),
            }
        };
        self.run(options.holder_timeout, &mut each)
    }

    /// Fetches until nothing is wanted.
    pub(crate) fn run(
        &mut self,
        patience: Duration,
        each: &mut dyn FnMut(&Self) -> Result<(), TransferError>,
    ) -> Result<(), TransferError> {
        // Other fetches may have dialled already.
        let known = (0..self.holders.len()).filter(|peer| self.holders.reach(*peer) != Reach::Down);
        known.collect::<Vec<_>>().into_iter().for_each(|peer| self.report_reach(peer));
        loop {
            each(self)?;
            let ended_dials = self.holders.ended_dials();
            let dialled: Vec<usize> = self.walk.plan.dialled().collect();
            dialled.into_iter().for_each(|peer| self.report_reach(peer));
            self.walk.plan.demand = !self.urgent && self.holders.is_demanded();
            self.walk.short = !self.urgent && self.holders.rate().is_none_or(|rate| rate < BASES_RATE);
            match self.walk.plan.next(self.holders.now()) {
                Action::Done => return Ok(()),
                Action::Request(ask) => self.send(ask)?,
                Action::Dial(peer) => {
                    self.holders.dial(peer);
                    self.report_reach(peer);
                }
                Action::AwaitDial => self.holders.wait_for_dial(ended_dials, POLL_INTERVAL),
                Action::Wait(ticket) => self.wait(ticket)?,
                Action::Sleep(until) => self.sleep(until, patience)?,
                Action::NoHolder(item) => return Err(self.holders.no_holder_error(digest_of(&item), None)),
            }
        }
    }

    /// Manifests of the bases that are here, and whether they are complete.
    fn bases(&self, capsule: &CapsuleId, ids: &[CapsuleId]) -> Vec<(Manifest, bool)> {
        let shelf = self.walk.local;
        let base = |id: &CapsuleId| {
            let manifest = Manifest::decode(&shelf.object(&id.0)?).ok()?;
            Some((manifest, shelf.is_complete(id)))
        };
        ids.iter().filter(|id| *id != capsule).filter_map(base).collect()
    }

    fn progress(&self) -> Progress {
        let (left, rate) = (self.walk.plan.bytes_left(), self.holders.rate());
        let eta =
            rate.filter(|rate| *rate > 0).map(|rate| Duration::from_secs_f64(left as f64 / rate as f64));
        Progress { received: self.report.received, left, rate, eta }
    }

    /// Tells the plan whether a holder can be asked.
    fn report_reach(&mut self, peer: usize) {
        let hurried = self.urgent && !self.patient;
        let plan = &mut self.walk.plan;
        match self.holders.reach(peer) {
            Reach::Up if hurried && self.holders.is_quiet(peer) && self.holders.has_other(peer) => {
                plan.down(peer, self.holders.now());
            }
            Reach::Up => {
                plan.measured(peer, limits(self.holders, peer));
                plan.up(peer);
            }
            // A machine does not wait for a holder that was away before.
            Reach::Dialling { again: true } if self.urgent => plan.down(peer, self.holders.now()),
            Reach::Dialling { .. } => plan.dialling(peer, self.holders.now()),
            Reach::Down => plan.down(peer, self.holders.now()),
            Reach::Blamed => plan.blamed(peer),
        }
    }

    fn sleep(&mut self, until: Duration, patience: Duration) -> Result<(), TransferError> {
        let quiet = (0..self.holders.len()).filter(|peer| self.holders.is_quiet(*peer));
        let quiet: Vec<usize> = quiet.filter(|_| self.urgent && !self.patient).collect();
        if !quiet.is_empty() {
            // No other holder has it, so one that has said nothing yet is waited for.
            self.patient = true;
            quiet.into_iter().for_each(|peer| self.report_reach(peer));
            return Ok(());
        }
        if self.urgent || (self.last_reply.elapsed() > patience && !self.walk.plan.demand) {
            let first = self.walk.plan.first().map_or(Digest([0; 32]), digest_of);
            return Err(self.holders.no_holder_error(first, self.refused.clone()));
        }
        // Sleeps briefly, so that a cancel is seen soon.
        std::thread::sleep(until.saturating_sub(self.holders.now()).min(POLL_INTERVAL));
        Ok(())
    }

    fn send(&mut self, ask: FetchRequest) -> Result<(), TransferError> {
        let (ticket, peer) = (ask.ticket, ask.peer);
        // The first replies tell little of a link: a busy holder looks like a slow link.
        let known = self.urgent || self.started.elapsed() > MEASURED_AFTER;
        let rate = self.holders.meter(peer).rate().filter(|_| known);
        let bases = if self.wants_bases(&ask, rate) { self.base_images.clone() } else { Vec::new() };
        let request = request(&ask, rate, &bases).map_err(|source| TransferError::Request { source })?;
        let bytes = (HEAD_SIZE + request.header.len() + request.payload.len()) as u64;
        if !self.flights.values().any(|flight| flight.ask.peer == peer) {
            self.holders.meter(peer).start(self.holders.now());
        }
        let begun = Instant::now();
        let link = match self.holders.link(peer) {
            Ok(link) => link,
            Err(error) => {
                self.failed(ticket, peer, None, &error);
                return Ok(());
            }
        };
        match link.start(request) {
            Ok(answer) => {
                self.report.requests += 1;
                self.report.sent += bytes;
                self.flights.insert(ticket, InFlight { ask, link, answer, started: begun, bases });
            }
            Err(error) => self.failed(ticket, peer, Some(&link), &error),
        }
        Ok(())
    }

    /// Whether the holder should look for similar pages in the base images: where sending what is left takes
    /// longer than reading those images takes the holder.
    fn wants_bases(&self, ask: &FetchRequest, rate: Option<u64>) -> bool {
        let pages = !matches!(
            ask.items.first().map(|queued| &queued.item),
            Some(FetchItem::Object(..) | FetchItem::BlobRange { .. }) | None
        );
        let long = |rate: u64| rate < BASES_RATE && self.walk.plan.bytes_left() > rate * BASES_SECONDS;
        pages && !self.urgent && rate.is_some_and(long)
    }

    fn failed(&mut self, ticket: u64, peer: usize, link: Option<&Arc<dyn Link>>, error: &LinkError) {
        self.walk.plan.unanswered(ticket);
        link.into_iter().for_each(|link| self.holders.lost(peer, link, error));
        // The link may be up again: others use it too.
        self.report_reach(peer);
    }

    /// Waits until a request is answered. False if a machine waits and nothing arrives from its holder, while
    /// another one is up.
    fn wait_answered(&mut self, ticket: u64) -> bool {
        let hurried = self.urgent && !self.patient && self.holders.len() > 1;
        let Some(flight) = self.flights.get_mut(&ticket).filter(|_| hurried) else { return true };
        let (peer, mut heard) = (flight.ask.peer, (flight.link.bytes().1, Instant::now()));
        self.holders.dial_next(peer);
        while !flight.answer.wait_ready(LOOK) {
            let bytes = flight.link.bytes().1;
            if bytes != heard.0 {
                heard = (bytes, Instant::now());
            } else if heard.1.elapsed() < self.holders.quiet_after(peer) {
                continue;
            } else if self.holders.has_other(peer) {
                self.holders.quiet(peer, &flight.link);
                return false;
            } else {
                self.holders.dial_others(peer);
            }
        }
        true
    }

    fn wait(&mut self, ticket: u64) -> Result<(), TransferError> {
        if !self.wait_answered(ticket) {
            if let Some(flight) = self.flights.remove(&ticket) {
                self.walk.plan.unanswered(ticket);
                self.report_reach(flight.ask.peer);
            }
            return Ok(());
        }
        let Some(InFlight { ask, link, answer, started: begun, bases }) = self.flights.remove(&ticket) else {
            self.walk.plan.unanswered(ticket);
            return Ok(());
        };
        let peer = ask.peer;
        match answer.wait() {
            Ok(reply) => {
                let bytes = (HEAD_SIZE + reply.header.len() + reply.payload.len()) as u64;
                self.last_reply = Instant::now();
                self.report.received += bytes;
                let more = self.flights.values().any(|flight| flight.ask.peer == peer);
                self.holders.meter(peer).answered(bytes, begun.elapsed(), self.holders.now(), more);
                self.walk.plan.measured(peer, limits(self.holders, peer));
                self.handle_reply(&ask, &bases, &reply)
            }
            Err(error @ LinkError::Refused { source: Refusal { retryable: true, .. } }) => {
                self.refused = Some(error);
                self.walk.plan.unanswered(ticket);
                self.walk.plan.down(peer, self.holders.now());
                Ok(())
            }
            Err(LinkError::Refused { .. }) => {
                let items = ask.items.into_iter().map(|queued| queued.item).collect();
                self.walk.plan.answered(ticket, Vec::new(), items);
                Ok(())
            }
            Err(error) => {
                self.failed(ticket, peer, Some(&link), &error);
                Ok(())
            }
        }
    }

    fn handle_reply(
        &mut self,
        ask: &FetchRequest,
        bases: &[BaseImage],
        reply: &Reply,
    ) -> Result<(), TransferError> {
        let taken = match ask.items.first().map(|queued| &queued.item) {
            Some(FetchItem::Object(kind, _)) => self.handle_objects(*kind, ask, reply),
            Some(FetchItem::BlobRange { digest, offset, total }) => {
                self.handle_blob_range(ask, (*digest, *offset, *total), reply)
            }
            _ => self.handle_pages(ask, bases, reply),
        };
        match taken {
            Ok(()) => Ok(()),
            Err(ReplyError::Wrong(digest)) => {
                self.holders.blame(ask.peer, digest);
                self.walk.plan.blamed(ask.peer);
                self.walk.plan.unanswered(ask.ticket);
                Ok(())
            }
            Err(ReplyError::Failed(error)) => Err(error),
        }
    }

    fn store(&self, kind: Kind, objects: &[&[u8]]) -> Result<(), ReplyError> {
        let kept = self.walk.local.store(kind, objects);
        kept.map_err(|source| ReplyError::Failed(TransferError::Store { source }))
    }

    fn handle_objects(
        &mut self,
        kind: ObjectKind,
        ask: &FetchRequest,
        reply: &Reply,
    ) -> Result<(), ReplyError> {
        let wants: Vec<WantedObject> = ask
            .items
            .iter()
            .filter_map(|queued| match &queued.item {
                FetchItem::Object(_, want) => Some(*want),
                _ => None,
            })
            .collect();
        let answer = decode::<Objects>(reply, &wants[0].digest)?;
        let came = decode_objects(self.walk.local, kind, &wants, &answer, &reply.payload)?;
        let (mut left, mut lacking) = (Vec::new(), Vec::new());
        let rest = &wants[came.len()..];
        left.extend(rest.iter().map(|want| FetchItem::Object(kind, *want)));
        for (want, came) in wants.iter().zip(came) {
            match came {
                ReceivedObject::Absent => lacking.push(FetchItem::Object(kind, *want)),
                ReceivedObject::NoSimilar => {
                    left.push(FetchItem::Object(kind, WantedObject { similar: None, ..*want }))
                }
                ReceivedObject::Long(total) => {
                    self.walk.plan.want(FetchItem::BlobRange { digest: want.digest, offset: 0, total })
                }
                ReceivedObject::Object(keys) if kind == ObjectKind::ShortLeaf => {
                    if !self.walk.short_leaf_arrived(want.digest, &keys)? {
                        return Err(ReplyError::Wrong(want.digest));
                    }
                }
                ReceivedObject::Object(bytes) => {
                    self.store(kind.into(), &[&bytes])?;
                    if kind == ObjectKind::Node {
                        self.walk.arrived(want.digest, &bytes)?;
                    }
                }
            }
        }
        self.walk.plan.answered(ask.ticket, left, lacking);
        Ok(())
    }

    fn handle_blob_range(
        &mut self,
        ask: &FetchRequest,
        want: (Digest, u64, u64),
        reply: &Reply,
    ) -> Result<(), ReplyError> {
        let (digest, offset, total) = want;
        let answer = decode::<BlobRange>(reply, &digest)?;
        let asked = blob_range_request(digest, offset, total, ask.max_bytes, 0);
        let bytes = decode_blob_range(&asked, &answer, &reply.payload)?;
        let blob = self.blobs.entry(digest).or_default();
        if blob.len() as u64 == offset {
            blob.extend(bytes);
        }
        let offset = blob.len() as u64;
        let left =
            (offset < answer.total).then_some(FetchItem::BlobRange { digest, offset, total: answer.total });
        if left.is_none() {
            let blob = self.blobs.remove(&digest).unwrap_or_default();
            if Digest::of(&blob) != digest {
                self.walk
                    .plan
                    .want(FetchItem::Object(ObjectKind::Blob, WantedObject { digest, similar: None }));
                self.walk.plan.answered(ask.ticket, Vec::new(), Vec::new());
                return Err(ReplyError::Wrong(digest));
            }
            self.store(Kind::Blob, &[&blob])?;
        }
        self.walk.plan.answered(ask.ticket, left.into_iter().collect(), Vec::new());
        Ok(())
    }

    fn handle_pages(
        &mut self,
        ask: &FetchRequest,
        bases: &[BaseImage],
        reply: &Reply,
    ) -> Result<(), ReplyError> {
        let mut asked: Vec<(RequestedLeaf, FetchItem)> = Vec::new();
        for queued in &ask.items {
            asked.extend(self.walk.requested_leaves(&queued.item).unwrap_or_default());
        }
        let leaves: Vec<RequestedLeaf> = asked.iter().map(|(asked, _)| asked.clone()).collect();
        let first = leaves.first().map_or(Digest([0; 32]), |asked| asked.leaf);
        let answer = decode::<LeafPages>(reply, &first)?;
        let came = decode_leaf_pages(self.walk.local, &leaves, bases, &answer, &reply.payload)?;
        self.record_size(&came, reply.payload.len());
        let (mut left, mut lacking) = (Vec::new(), Vec::new());
        left.extend(asked[came.leaves.len()..].iter().map(|(_, item)| item.clone()));
        for (leaf, (asked, item)) in came.leaves.iter().zip(&asked) {
            match leaf {
                ReceivedLeaf::Pages { pages, node, delta } => {
                    let places = pages.iter().filter_map(|(_, place)| place.clone());
                    let contents: Vec<&[u8]> = places.map(|place| &came.buffer[place]).collect();
                    let count = if *delta { &mut self.walk.pages.delta } else { &mut self.walk.pages.plain };
                    *count += contents.len() as u64;
                    self.walk.pages.zero += (pages.len() - contents.len()) as u64;
                    self.store(Kind::Pages, &contents)?;
                    node.iter().try_for_each(|node| self.store(Kind::Nodes, &[node]))?;
                    match &asked.slots {
                        RequestedSlots::Short(..) => {
                            self.walk
                                .short_leaf_pages_arrived(contents.iter().map(|page| Digest::of(page)))?;
                        }
                        _ => self.walk.pages_arrived(&asked.leaf, pages.iter().map(|(slot, _)| *slot)),
                    }
                }
                ReceivedLeaf::NoBases => {
                    self.base_images.clear();
                    left.push(item.clone());
                }
                ReceivedLeaf::Absent => lacking.push(item.clone()),
                ReceivedLeaf::NoSimilar | ReceivedLeaf::Large => match item {
                    FetchItem::Pages { similar: None, .. } => lacking.push(item.clone()),
                    FetchItem::Pages { leaf, slots, .. } => {
                        left.push(FetchItem::Pages { leaf: *leaf, similar: None, slots: *slots });
                    }
                    _ => {
                        let similar =
                            self.walk.similar_of(item).filter(|_| matches!(leaf, ReceivedLeaf::Large));
                        self.walk.want_leaf(asked.leaf, similar);
                    }
                },
            }
        }
        self.walk.plan.answered(ask.ticket, left, lacking);
        Ok(())
    }

    fn record_size(&mut self, came: &ReceivedPages, bytes: usize) {
        let plain = came
            .leaves
            .iter()
            .all(|leaf| matches!(leaf, ReceivedLeaf::Pages { node: None, delta: false, .. }));
        let built = came.leaves.iter().all(|leaf| matches!(leaf, ReceivedLeaf::Pages { node: Some(_), .. }));
        if plain {
            self.walk.plan.record_page_bytes(came.buffer.len() / whimbrel_core::PAGE_SIZE, bytes);
        } else if built {
            self.walk.plan.record_leaf_bytes(came.leaves.len(), bytes);
        }
    }
}

/// Reason why a reply was not used.
enum ReplyError {
    Wrong(Digest),
    Failed(TransferError),
}

impl From<crate::answer_decoder::WrongContent> for ReplyError {
    fn from(wrong: crate::answer_decoder::WrongContent) -> Self {
        Self::Wrong(wrong.digest)
    }
}

impl From<TransferError> for ReplyError {
    fn from(error: TransferError) -> Self {
        Self::Failed(error)
    }
}

fn decode<C: Call>(reply: &Reply, digest: &Digest) -> Result<C::Reply, ReplyError> {
    reply.decode::<C>().map_err(|_| ReplyError::Wrong(*digest))
}

fn digest_of(item: &FetchItem) -> Digest {
    match item {
        FetchItem::Object(_, want) => want.digest,
        FetchItem::BlobRange { digest, .. } => *digest,
        FetchItem::Children { node, .. } => *node,
        FetchItem::Leaf { leaf, .. } | FetchItem::Pages { leaf, .. } => *leaf,
    }
}

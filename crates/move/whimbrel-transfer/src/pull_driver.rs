//! Pull driver: carries out the actions of a pull plan, with the links, the clock and the local objects of a
//! pull.
//!
//! One thread, which also decodes; requests overlap. What arrives is stored at once if it has the requested
//! digest. A holder that sends anything else is blamed, and its requests go to another one.

use crate::{
    BASES_MAX, BaseImage, Holders, Link, LinkError, LocalObjects, PageLookup, SyncError,
    answer_decoder::{
        AskedSlots, CameLeaf, CamePages, ReceivedObject, RequestedLeaf, open_objects, open_pages, open_piece,
    },
    link::Answer,
    protocol::*,
    pull::{Options, Progress, Report},
    pull_plan::{Action, FetchItem, FetchRequest, Limits, PullPlan},
    request_builder::{piece, request},
    tree_walk::TreeWalk,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_image::{Manifest, pack_frame::Kind};
use whimbrel_wire::{Call, HEAD_SIZE, Reply};

/// Link rate in bytes a second above which similar pages are not looked for: 200 Mbit/s.
const BASES_RATE: u64 = 25_000_000;
/// Least seconds for the rest at which the search pays: a sketch of a disk takes about one.
const BASES_SECONDS: u64 = 2;
/// Time after which the measured rate of a link is used.
const KNOWN_AFTER: Duration = Duration::from_millis(500);

struct Flight {
    ask: FetchRequest,
    link: Arc<dyn Link>,
    answer: Box<dyn Answer>,
    begun: Instant,
    /// Base images that the request named.
    bases: Vec<BaseImage>,
}

/// State of a running pull.
pub(crate) struct PullDriver<'a> {
    pub(crate) walk: TreeWalk<'a>,
    sources: &'a Holders,
    /// Whether a machine waits for this: it goes before prefetching, and fails rather than wait.
    pub(crate) urgent: bool,
    /// Capsule to pull, if it is a pull of a capsule, and its bases.
    capsule: Option<(CapsuleId, Vec<(Manifest, bool)>)>,
    flights: BTreeMap<u64, Flight>,
    blobs: HashMap<Digest, Vec<u8>>,
    /// Images that are complete here and probably resemble what is wanted.
    base_images: Vec<BaseImage>,
    pub(crate) report: Report,
    begun: Instant,
    heard: Instant,
}

fn limits(sources: &Holders, peer: usize) -> Limits {
    if peer >= sources.len() {
        return Limits { window: 0, answer: 0 };
    }
    let meter = sources.meter(peer);
    Limits { window: meter.window(), answer: meter.answer_bytes() }
}

impl<'a> PullDriver<'a> {
    pub(crate) fn new(
        shelf: &'a dyn LocalObjects,
        sources: &'a Holders,
        holders: &'a [&'a dyn PageLookup],
    ) -> Self {
        Self {
            walk: TreeWalk::new(
                shelf,
                holders,
                PullPlan::new(sources.len(), limits(sources, 0), sources.retry()),
            ),
            sources,
            urgent: false,
            capsule: None,
            flights: BTreeMap::new(),
            blobs: HashMap::new(),
            base_images: Vec::new(),
            report: Report::default(),
            begun: Instant::now(),
            heard: Instant::now(),
        }
    }

    /// Fetches all objects of a capsule.
    pub(crate) fn capsule(&mut self, id: CapsuleId, options: Options<'_>) -> Result<(), SyncError> {
        let bases = self.bases(&id, &options.bases);
        self.capsule = Some((id, bases));
        match self.walk.shelf.object(&id.0) {
            Some(bytes) => self.start(&bytes)?,
            None => {
                let want = WantObject { digest: id.0, similar: None };
                self.walk.plan.want(FetchItem::Object(ObjectKind::Manifest, want));
            }
        }
        let mut each = |driver: &Self| {
            (options.progress)(&driver.progress());
            match options.cancel.load(Ordering::Acquire) {
                true => Err(SyncError::Cancelled),
                false => Ok(()),
            }
        };
        self.run(options.patience, &mut each)
    }

    /// Fetches until nothing is wanted.
    pub(crate) fn run(
        &mut self,
        patience: Duration,
        each: &mut dyn FnMut(&Self) -> Result<(), SyncError>,
    ) -> Result<(), SyncError> {
        loop {
            each(self)?;
            self.walk.plan.demand = !self.urgent && self.sources.is_demanded();
            self.walk.short = !self.urgent && self.sources.rate().is_none_or(|rate| rate < BASES_RATE);
            match self.walk.plan.next(self.sources.now()) {
                Action::Done => return Ok(()),
                Action::Ask(ask) => self.send(ask)?,
                Action::Dial(peer) => self.dial(peer),
                Action::Wait(ticket) => self.wait(ticket)?,
                Action::Sleep(until) => self.sleep(until, patience)?,
                Action::Nowhere(item) => return Err(self.sources.nowhere(digest_of(&item))),
            }
        }
    }

    /// Manifests of the bases that are here, and whether they are complete.
    fn bases(&self, capsule: &CapsuleId, ids: &[CapsuleId]) -> Vec<(Manifest, bool)> {
        let shelf = self.walk.shelf;
        let base = |id: &CapsuleId| {
            let manifest = Manifest::decode(&shelf.object(&id.0)?).ok()?;
            Some((manifest, shelf.is_complete(id)))
        };
        ids.iter().filter(|id| *id != capsule).filter_map(base).collect()
    }

    fn start(&mut self, bytes: &[u8]) -> Result<(), SyncError> {
        let Some((capsule, bases)) = &self.capsule else { return Ok(()) };
        let bad = |source| SyncError::Manifest { capsule: *capsule, source };
        let manifest = Manifest::decode(bytes).map_err(bad)?;
        let whole = bases.iter().filter(|(_, whole)| *whole).flat_map(|(base, _)| &base.images);
        let images = whole.filter_map(|image| Some(BaseImage { root: image.root?, pages: image.pages }));
        self.base_images = images.take(BASES_MAX).collect();
        self.walk.capsule(&manifest, bases)
    }

    fn progress(&self) -> Progress {
        let (left, rate) = (self.walk.plan.bytes_left(), self.sources.rate());
        let eta =
            rate.filter(|rate| *rate > 0).map(|rate| Duration::from_secs_f64(left as f64 / rate as f64));
        Progress { received: self.report.received, left, rate, eta }
    }

    fn dial(&mut self, peer: usize) {
        match self.sources.link(peer) {
            Ok(_) => {
                self.walk.plan.measured(peer, limits(self.sources, peer));
                self.walk.plan.up(peer);
            }
            Err(_) if self.sources.is_blamed(peer) => self.walk.plan.gone(peer),
            Err(_) => self.walk.plan.down(peer, self.sources.now()),
        }
    }

    fn sleep(&self, until: Duration, patience: Duration) -> Result<(), SyncError> {
        if self.urgent || (self.heard.elapsed() > patience && !self.walk.plan.demand) {
            let first = self.walk.plan.first().map_or(Digest([0; 32]), digest_of);
            return Err(self.sources.nowhere(first));
        }
        // Sleeps briefly, so that a cancel is seen soon.
        std::thread::sleep(until.saturating_sub(self.sources.now()).min(Duration::from_millis(50)));
        Ok(())
    }

    fn send(&mut self, ask: FetchRequest) -> Result<(), SyncError> {
        let (ticket, peer) = (ask.ticket, ask.peer);
        // The first replies tell little of a link: a busy holder looks like a slow link.
        let known = self.urgent || self.begun.elapsed() > KNOWN_AFTER;
        let rate = self.sources.meter(peer).rate().filter(|_| known);
        let bases = if self.looks_into_bases(&ask, rate) { self.base_images.clone() } else { Vec::new() };
        let request = request(&ask, rate, &bases).map_err(|source| SyncError::Request { source })?;
        let bytes = (HEAD_SIZE + request.header.len() + request.payload.len()) as u64;
        if !self.flights.values().any(|flight| flight.ask.peer == peer) {
            self.sources.meter(peer).start(self.sources.now());
        }
        let begun = Instant::now();
        let link = match self.sources.link(peer) {
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
                self.flights.insert(ticket, Flight { ask, link, answer, begun, bases });
            }
            Err(error) => self.failed(ticket, peer, Some(&link), &error),
        }
        Ok(())
    }

    /// Whether the holder should look for similar pages in the base images: where sending what is left takes
    /// longer than reading those images takes the holder.
    fn looks_into_bases(&self, ask: &FetchRequest, rate: Option<u64>) -> bool {
        let pages = !matches!(
            ask.items.first().map(|queued| &queued.item),
            Some(FetchItem::Object(..) | FetchItem::Piece { .. }) | None
        );
        let long = |rate: u64| rate < BASES_RATE && self.walk.plan.bytes_left() > rate * BASES_SECONDS;
        pages && !self.urgent && rate.is_some_and(long)
    }

    fn failed(&mut self, ticket: u64, peer: usize, link: Option<&Arc<dyn Link>>, error: &LinkError) {
        self.walk.plan.unanswered(ticket);
        link.into_iter().for_each(|link| self.sources.lost(peer, link, error));
        // A link that was lost with several requests is reported down once, not for each.
        if self.sources.is_blamed(peer) {
            self.walk.plan.gone(peer);
        } else if self.sources.dial_at(peer).is_some() {
            self.walk.plan.down(peer, self.sources.now());
        }
    }

    fn wait(&mut self, ticket: u64) -> Result<(), SyncError> {
        let Some(Flight { ask, link, answer, begun, bases }) = self.flights.remove(&ticket) else {
            self.walk.plan.unanswered(ticket);
            return Ok(());
        };
        let peer = ask.peer;
        match answer.wait() {
            Ok(reply) => {
                let bytes = (HEAD_SIZE + reply.header.len() + reply.payload.len()) as u64;
                self.heard = Instant::now();
                self.report.received += bytes;
                let more = self.flights.values().any(|flight| flight.ask.peer == peer);
                self.sources.meter(peer).answered(bytes, begun.elapsed(), self.sources.now(), more);
                self.walk.plan.measured(peer, limits(self.sources, peer));
                self.take(&ask, &bases, &reply)
            }
            Err(LinkError::Refused { source }) if source.retryable => {
                self.walk.plan.unanswered(ticket);
                self.walk.plan.down(peer, self.sources.now());
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

    fn take(&mut self, ask: &FetchRequest, bases: &[BaseImage], reply: &Reply) -> Result<(), SyncError> {
        let taken = match ask.items.first().map(|queued| &queued.item) {
            Some(FetchItem::Object(kind, _)) => self.take_objects(*kind, ask, reply),
            Some(FetchItem::Piece { digest, offset, total }) => {
                self.take_piece(ask, (*digest, *offset, *total), reply)
            }
            _ => self.take_pages(ask, bases, reply),
        };
        match taken {
            Ok(()) => Ok(()),
            Err(Taken::Wrong(digest)) => {
                self.sources.blame(ask.peer, digest);
                self.walk.plan.gone(ask.peer);
                self.walk.plan.unanswered(ask.ticket);
                Ok(())
            }
            Err(Taken::Failed(error)) => Err(error),
        }
    }

    fn store(&self, kind: Kind, objects: &[&[u8]]) -> Result<(), Taken> {
        let kept = self.walk.shelf.store(kind, objects);
        kept.map_err(|source| Taken::Failed(SyncError::Keep { source }))
    }

    fn take_objects(&mut self, kind: ObjectKind, ask: &FetchRequest, reply: &Reply) -> Result<(), Taken> {
        let wants: Vec<WantObject> = ask
            .items
            .iter()
            .filter_map(|queued| match &queued.item {
                FetchItem::Object(_, want) => Some(*want),
                _ => None,
            })
            .collect();
        let answer = decode::<Objects>(reply, &wants[0].digest)?;
        let came = open_objects(self.walk.shelf, kind, &wants, &answer, &reply.payload)?;
        let (mut left, mut lacking) = (Vec::new(), Vec::new());
        let rest = &wants[came.len()..];
        left.extend(rest.iter().map(|want| FetchItem::Object(kind, *want)));
        for (want, came) in wants.iter().zip(came) {
            match came {
                ReceivedObject::Absent => lacking.push(FetchItem::Object(kind, *want)),
                ReceivedObject::NoSimilar => {
                    left.push(FetchItem::Object(kind, WantObject { similar: None, ..*want }))
                }
                ReceivedObject::Long(total) => {
                    self.walk.plan.want(FetchItem::Piece { digest: want.digest, offset: 0, total })
                }
                ReceivedObject::Object(keys) if kind == ObjectKind::ShortLeaf => {
                    if !self.walk.keys_came(want.digest, &keys)? {
                        return Err(Taken::Wrong(want.digest));
                    }
                }
                ReceivedObject::Object(bytes) => {
                    self.store(kind.into(), &[&bytes])?;
                    match kind {
                        ObjectKind::Manifest => self.start(&bytes)?,
                        ObjectKind::Node => self.walk.arrived(want.digest, &bytes)?,
                        ObjectKind::Blob | ObjectKind::ShortLeaf => {}
                    }
                }
            }
        }
        self.walk.plan.answered(ask.ticket, left, lacking);
        Ok(())
    }

    fn take_piece(
        &mut self,
        ask: &FetchRequest,
        want: (Digest, u64, u64),
        reply: &Reply,
    ) -> Result<(), Taken> {
        let (digest, offset, total) = want;
        let answer = decode::<BlobRange>(reply, &digest)?;
        let asked = piece(digest, offset, total, ask.max_bytes, 0);
        let bytes = open_piece(&asked, &answer, &reply.payload)?;
        let blob = self.blobs.entry(digest).or_default();
        if blob.len() as u64 == offset {
            blob.extend(bytes);
        }
        let offset = blob.len() as u64;
        let left =
            (offset < answer.total).then_some(FetchItem::Piece { digest, offset, total: answer.total });
        if left.is_none() {
            let blob = self.blobs.remove(&digest).unwrap_or_default();
            if Digest::of(&blob) != digest {
                self.walk
                    .plan
                    .want(FetchItem::Object(ObjectKind::Blob, WantObject { digest, similar: None }));
                self.walk.plan.answered(ask.ticket, Vec::new(), Vec::new());
                return Err(Taken::Wrong(digest));
            }
            self.store(Kind::Blob, &[&blob])?;
        }
        self.walk.plan.answered(ask.ticket, left.into_iter().collect(), Vec::new());
        Ok(())
    }

    fn take_pages(&mut self, ask: &FetchRequest, bases: &[BaseImage], reply: &Reply) -> Result<(), Taken> {
        let mut asked: Vec<(RequestedLeaf, FetchItem)> = Vec::new();
        for queued in &ask.items {
            asked.extend(self.walk.asked(&queued.item).unwrap_or_default());
        }
        let leaves: Vec<RequestedLeaf> = asked.iter().map(|(asked, _)| asked.clone()).collect();
        let first = leaves.first().map_or(Digest([0; 32]), |asked| asked.leaf);
        let answer = decode::<LeafPages>(reply, &first)?;
        let came = open_pages(self.walk.shelf, &leaves, bases, &answer, &reply.payload)?;
        self.record_size(&came, reply.payload.len());
        let (mut left, mut lacking) = (Vec::new(), Vec::new());
        left.extend(asked[came.leaves.len()..].iter().map(|(_, item)| item.clone()));
        for (leaf, (asked, item)) in came.leaves.iter().zip(&asked) {
            match leaf {
                CameLeaf::Pages { pages, node, delta } => {
                    let places = pages.iter().filter_map(|(_, place)| place.clone());
                    let contents: Vec<&[u8]> = places.map(|place| &came.buffer[place]).collect();
                    let count = if *delta { &mut self.walk.pages.delta } else { &mut self.walk.pages.plain };
                    *count += contents.len() as u64;
                    self.walk.pages.zero += (pages.len() - contents.len()) as u64;
                    self.store(Kind::Pages, &contents)?;
                    node.iter().try_for_each(|node| self.store(Kind::Nodes, &[node]))?;
                    match &asked.slots {
                        AskedSlots::Short(..) => {
                            self.walk.keyed_pages_came(contents.iter().map(|page| Digest::of(page)))?;
                        }
                        _ => self.walk.pages_came(&asked.leaf, pages.iter().map(|(slot, _)| *slot)),
                    }
                }
                CameLeaf::NoBases => {
                    self.base_images.clear();
                    left.push(item.clone());
                }
                CameLeaf::Absent => lacking.push(item.clone()),
                CameLeaf::NoSimilar | CameLeaf::Large => match item {
                    FetchItem::Pages { similar: None, .. } => lacking.push(item.clone()),
                    FetchItem::Pages { leaf, slots, .. } => {
                        left.push(FetchItem::Pages { leaf: *leaf, similar: None, slots: *slots });
                    }
                    _ => {
                        let similar = self.walk.similar_of(item).filter(|_| matches!(leaf, CameLeaf::Large));
                        self.walk.leaf_instead(asked.leaf, similar);
                    }
                },
            }
        }
        self.walk.plan.answered(ask.ticket, left, lacking);
        Ok(())
    }

    fn record_size(&mut self, came: &CamePages, bytes: usize) {
        let plain =
            came.leaves.iter().all(|leaf| matches!(leaf, CameLeaf::Pages { node: None, delta: false, .. }));
        let built = came.leaves.iter().all(|leaf| matches!(leaf, CameLeaf::Pages { node: Some(_), .. }));
        if plain {
            self.walk.plan.learn_pages(came.buffer.len() / whimbrel_core::PAGE_SIZE, bytes);
        } else if built {
            self.walk.plan.learn_leaves(came.leaves.len(), bytes);
        }
    }
}

/// Reason why a reply was not used.
enum Taken {
    Wrong(Digest),
    Failed(SyncError),
}

impl From<crate::answer_decoder::WrongContent> for Taken {
    fn from(wrong: crate::answer_decoder::WrongContent) -> Self {
        Self::Wrong(wrong.digest)
    }
}

impl From<SyncError> for Taken {
    fn from(error: SyncError) -> Self {
        Self::Failed(error)
    }
}

fn decode<C: Call>(reply: &Reply, digest: &Digest) -> Result<C::Reply, Taken> {
    reply.decode::<C>().map_err(|_| Taken::Wrong(*digest))
}

fn digest_of(item: &FetchItem) -> Digest {
    match item {
        FetchItem::Object(_, want) => want.digest,
        FetchItem::Piece { digest, .. } => *digest,
        FetchItem::Children { node, .. } => *node,
        FetchItem::Leaf { leaf, .. } | FetchItem::Pages { leaf, .. } => *leaf,
    }
}

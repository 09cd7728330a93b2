//! The receiving side: machines that are arriving, and what each message does to them.
//!
//! One lock an arrival, never held across another's work. Everything a message says is checked against the
//! offer before it is used. The states are those of [`crate::handover::Target`]; this file turns its actions
//! into calls of [`Arrival`], which the host implements.

use crate::{
    codec::{self, Decoder},
    error::TargetError,
    handover::{Target, TargetAction, TargetEvent},
    protocol::{self, Accepted, BlobPiece, Finish, HandoverId, Offer, Pages},
};
use bytes::Bytes;
use std::{
    collections::HashMap,
    error::Error,
    sync::{Arc, Mutex, MutexGuard},
};
use whimbrel_core::{Digest, PAGE_SIZE, PageRun};

/// An error of the host while it serves an arrival.
pub type HostError = Box<dyn Error + Send + Sync>;

/// Where machines land: reserves room for them.
pub trait Landing: Send + Sync {
    /// Reserves name, memory, disks and devices for `offer`, or says why not.
    fn reserve(&self, offer: &Offer) -> Result<Box<dyn Arrival>, HostError>;
}

/// A machine that is arriving: its arrays are here and filled, it does not run yet.
pub trait Arrival: Send {
    /// Blobs of the offer that are not here yet.
    fn blobs_missing(&self) -> Vec<Digest>;

    /// Stores a whole blob whose digest was checked.
    fn put_blob(&mut self, digest: Digest, content: Vec<u8>) -> Result<(), HostError>;

    /// Stores pages of an array.
    fn write(&mut self, array: usize, run: PageRun, data: &[u8]) -> Result<(), HostError>;

    /// Makes pages of an array zero.
    fn zero(&mut self, array: usize, run: PageRun) -> Result<(), HostError>;

    /// Reads pages of an array back.
    fn read(&self, array: usize, run: PageRun, out: &mut [u8]) -> Result<(), HostError>;

    /// Loads the device state into a paused machine and writes down, durably, that it waits here.
    fn prepare(&mut self, finish: &Finish, device_state: &[u8]) -> Result<(), HostError>;

    /// Lets the machine run, opens its network and announces it.
    fn run(&mut self) -> Result<(), HostError>;

    /// Ends it and frees what was reserved.
    fn discard(&mut self);
}

struct Arriving {
    state: Target,
    arrival: Box<dyn Arrival>,
    /// Lengths of the offered arrays, in pages.
    arrays: Vec<u64>,
    blobs: Vec<(Digest, u64)>,
    blob: Vec<u8>,
    decoder: Decoder,
}

/// All machines that are arriving at this host.
pub struct Arrivals {
    landing: Arc<dyn Landing>,
    table: Mutex<HashMap<HandoverId, Arc<Mutex<Arriving>>>>,
}

impl Arrivals {
    /// No machine is arriving yet.
    pub fn new(landing: Arc<dyn Landing>) -> Self {
        Self { landing, table: Mutex::default() }
    }

    /// Takes up an arrival that an earlier daemon had prepared: it waits for the source's word.
    pub fn adopt_prepared(&self, handover: HandoverId, arrival: Box<dyn Arrival>) -> Result<(), TargetError> {
        let decoder = Decoder::new().map_err(TargetError::codec)?;
        let state = Target::Prepared;
        let arriving = Arriving { state, arrival, arrays: vec![], blobs: vec![], blob: vec![], decoder };
        self.table().insert(handover, Arc::new(Mutex::new(arriving)));
        Ok(())
    }

    /// Handles one message and returns the reply's header. Blocks while the arrival works.
    pub fn handle(&self, kind: u16, header: &[u8], payload: Bytes) -> Result<Vec<u8>, TargetError> {
        match kind {
            protocol::OFFER => self.offer(parse(header)?),
            protocol::BLOB => {
                let piece: BlobPiece = parse(header)?;
                self.with(piece.handover, |arriving| arriving.blob_piece(&piece, &payload))
            }
            protocol::PAGES => {
                let pages: Pages = parse(header)?;
                self.with(pages.handover, |arriving| arriving.pages(&pages, &payload))
            }
            protocol::FINISH => {
                let finish: Finish = parse(header)?;
                self.with(finish.handover, |arriving| arriving.finish(&finish, &payload))
            }
            protocol::COMMIT => self.with(parse(header)?, |arriving| arriving.event(TargetEvent::Commit)),
            protocol::ABORT => {
                let id = parse(header)?;
                let done = self.with(id, |arriving| arriving.event(TargetEvent::Abort));
                self.forget_discarded();
                // Giving up something that was never heard of, or is gone already, is no error.
                done.or_else(
                    |error| if let TargetError::Unknown { .. } = error { Ok(vec![]) } else { Err(error) },
                )
            }
            kind => Err(TargetError::Kind { kind }),
        }
    }

    /// The connection that carried `handover` is gone.
    pub fn connection_lost(&self, handover: HandoverId) {
        let _ = self.with(handover, |arriving| arriving.event(TargetEvent::Failed));
        self.forget_discarded();
    }

    fn offer(&self, offer: Offer) -> Result<Vec<u8>, TargetError> {
        check_offer(&offer)?;
        if self.table().contains_key(&offer.handover) {
            return Err(TargetError::Invalid { what: "a second offer of one handover" });
        }
        let decoder = Decoder::new().map_err(TargetError::codec)?;
        let arrival = self.landing.reserve(&offer).map_err(|source| TargetError::Refused { source })?;
        let accepted = Accepted { blobs_missing: arrival.blobs_missing() };
        let arrays = offer.arrays.iter().map(|array| array.pages).collect();
        let (state, blobs) = (Target::Receiving, offer.blobs);
        let arriving = Arriving { state, arrival, arrays, blobs, blob: vec![], decoder };
        self.table().insert(offer.handover, Arc::new(Mutex::new(arriving)));
        Ok(postcard::to_stdvec(&accepted).expect("a reply is always encodable"))
    }

    fn with(
        &self,
        handover: HandoverId,
        act: impl FnOnce(&mut Arriving) -> Result<(), TargetError>,
    ) -> Result<Vec<u8>, TargetError> {
        let arriving = self.table().get(&handover).cloned().ok_or(TargetError::Unknown { handover })?;
        let mut arriving = arriving.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        act(&mut arriving).map(|()| Vec::new())
    }

    fn forget_discarded(&self) {
        self.table().retain(|_, arriving| arriving.try_lock().map_or(true, |a| a.state != Target::Discarded));
    }

    fn table(&self) -> MutexGuard<'_, HashMap<HandoverId, Arc<Mutex<Arriving>>>> {
        self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Arriving {
    fn event(&mut self, event: TargetEvent) -> Result<(), TargetError> {
        let (next, actions) = self.state.step(event);
        for action in actions {
            match action {
                TargetAction::RunAndSaySo => {
                    self.arrival.run().map_err(|source| TargetError::Run { source })?;
                }
                TargetAction::Discard => self.arrival.discard(),
                // `prepare` has written it down; the reply to the message says it.
                TargetAction::RecordAndSayReady | TargetAction::SayRunning => {}
            }
        }
        self.state = next;
        match (event, next) {
            (TargetEvent::Commit, Target::Running) | (TargetEvent::Abort | TargetEvent::Failed, _) => Ok(()),
            (TargetEvent::Loaded, Target::Prepared) => Ok(()),
            _ => Err(TargetError::State { state: next }),
        }
    }

    fn receiving(&self) -> Result<(), TargetError> {
        match self.state {
            Target::Receiving => Ok(()),
            state => Err(TargetError::State { state }),
        }
    }

    fn blob_piece(&mut self, piece: &BlobPiece, data: &[u8]) -> Result<(), TargetError> {
        self.receiving()?;
        let known = self.blobs.iter().find(|(digest, _)| *digest == piece.digest);
        let (digest, size) = *known.ok_or(TargetError::Invalid { what: "a blob that was not offered" })?;
        if piece.offset == 0 {
            self.blob.clear();
        }
        if piece.offset != self.blob.len() as u64 || piece.offset + data.len() as u64 > size {
            return Err(TargetError::Invalid { what: "a blob piece out of order" });
        }
        self.blob.extend_from_slice(data);
        if (self.blob.len() as u64) < size {
            return Ok(());
        }
        let content = std::mem::take(&mut self.blob);
        if Digest::of(&content) != digest {
            return Err(TargetError::Invalid { what: "a blob with another digest" });
        }
        self.arrival.put_blob(digest, content).map_err(TargetError::write)
    }

    fn pages(&mut self, pages: &Pages, payload: &[u8]) -> Result<(), TargetError> {
        self.receiving()?;
        let array = pages.batch.array as usize;
        let len =
            *self.arrays.get(array).ok_or(TargetError::Invalid { what: "an array that was not offered" })?;
        pages.batch.check(len)?;
        let raw = self.decoder.decode(&pages.batch, payload)?;
        let mut rest = &raw[..];
        for run in &pages.batch.whole {
            let (data, after) = rest.split_at(run.bytes());
            self.arrival.write(array, *run, data).map_err(TargetError::write)?;
            rest = after;
        }
        let mut buffer = Vec::new();
        for run in &pages.batch.delta {
            let (delta, after) = rest.split_at(run.bytes());
            buffer.resize(run.bytes(), 0);
            self.arrival.read(array, *run, &mut buffer).map_err(TargetError::write)?;
            codec::apply_delta(&mut buffer, delta);
            self.arrival.write(array, *run, &buffer).map_err(TargetError::write)?;
            rest = after;
        }
        pages.batch.zero.iter().try_for_each(|run| self.arrival.zero(array, *run)).map_err(TargetError::write)
    }

    fn finish(&mut self, finish: &Finish, device_state: &[u8]) -> Result<(), TargetError> {
        self.receiving()?;
        match self.arrival.prepare(finish, device_state) {
            Ok(()) => self.event(TargetEvent::Loaded),
            Err(source) => {
                self.event(TargetEvent::Failed)?;
                Err(TargetError::Prepare { source })
            }
        }
    }
}

fn parse<'a, T: serde::Deserialize<'a>>(header: &'a [u8]) -> Result<T, TargetError> {
    postcard::from_bytes(header).map_err(|source| TargetError::Header { source })
}

/// What can be said about an offer without knowing the host.
fn check_offer(offer: &Offer) -> Result<(), TargetError> {
    let disks = offer.config.disks.iter().map(|disk| disk.size.0 / PAGE_SIZE as u64);
    let expected: Vec<u64> = std::iter::once(offer.config.memory_pages()).chain(disks).collect();
    let arrays: Vec<u64> = offer.arrays.iter().map(|array| array.pages).collect();
    if arrays.len() > protocol::ARRAYS_MAX || arrays != expected {
        return Err(TargetError::Invalid { what: "arrays that do not fit the machine's configuration" });
    }
    if offer.blobs.len() > 2 || offer.blobs.iter().any(|(_, size)| *size > protocol::BLOB_MAX) {
        return Err(TargetError::Invalid { what: "too many or too large boot files" });
    }
    Ok(())
}

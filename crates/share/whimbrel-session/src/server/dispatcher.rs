//! Dispatcher: checks the key of each request, then handles it on a thread that may wait for the disk.
//!
//! One server may serve any number of connections and transports. Nothing of it needs to be stored when it
//! ends.

use super::{
    Export, ExportAccess, Limits,
    file_copy::copy,
    listing::Listing,
    name_changes,
    open_files::MAX_RANGE,
    refuse,
    sessions::{ServedSession, Sessions},
    tree_listing::walk,
    xattrs,
};
use crate::proto::{
    Attr, AttrBatch, AttrCall, ClientId, CopyCall, DigestCall, Digests, DigestsDone, EndCall,
    FIRST_WITH_NODES, FileRef, FilesystemSpace, HolesCall, HolesDone, Keyed, ListCall, LookedUp, Lookup,
    LookupCall, OpCall, Open, OpenCall, Opened, PagesCall, Read, ReadCall, ReadDone, ReadPages, ReadlinkCall,
    SPOKEN, ShareKey, StatfsCall, SyncCall, WalkCall, Write, WriteCall, WriteDone, XattrAction, XattrCall,
    code, is_in, pack_digests, pack_holes, pack_some, request_name, unpack_pages,
};
use bytes::Bytes;
use rand::Rng;
use rustix::io::Errno;
use std::{sync::Arc, time::Instant};
use whimbrel_metrics::CallDurations;
use whimbrel_wire::{Answer, BoxFuture, Call, Code, Peer, PeerIdentity, Refusal, Reply, Request, Service};

/// Most paths of one request for attributes.
const MAX_BATCH: usize = 1000;

/// The exports of a server, and the sessions that use them. Clones refer to the same server.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    exports: Vec<Export>,
    read_only: bool,
    limits: Limits,
    sessions: Sessions,
    /// Secret for share keys, known to this process only.
    secret: Option<[u8; 32]>,
    calls: CallDurations,
}

impl Server {
    /// Makes a server of these exports.
    pub fn new(exports: Vec<Export>, read_only: bool, limits: Limits) -> Self {
        let secret = limits.share.then(|| rand::rng().random());
        Self {
            shared: Arc::new(Shared {
                exports,
                read_only,
                limits,
                sessions: Sessions::default(),
                secret,
                calls: CallDurations::default(),
            }),
        }
    }

    /// Number of current sessions.
    pub fn sessions(&self) -> usize {
        self.shared.sessions.len()
    }

    /// Durations of the requests that were answered.
    pub fn calls(&self) -> &CallDurations {
        &self.shared.calls
    }
}

whimbrel_core::opaque_debug!(Server);

impl Service for Server {
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        let (shared, identity) = (self.shared.clone(), peer.identity.clone());
        Box::pin(async move {
            let work = tokio::task::spawn_blocking(move || {
                let begun = Instant::now();
                let answer = shared.answer(&identity, &request);
                let outcome = if answer.is_ok() { "done" } else { "refused" };
                let call = request_name(request.kind).unwrap_or("other");
                shared.calls.observe(call, outcome, begun.elapsed());
                answer
            });
            work.await.unwrap_or_else(|_| Err(Refusal::new(Code::INTERNAL, "the handler failed")))
        })
    }
}

type Outcome<C> = Result<(<C as Call>::Reply, Bytes), Refusal>;

impl Shared {
    fn answer(&self, peer: &PeerIdentity, request: &Request) -> Answer {
        match request.kind {
            OpenCall::KIND => {
                let (opened, incarnation) =
                    self.open(peer, &request.decode::<OpenCall>()?, &request.payload)?;
                Reply::of::<OpenCall>(&opened, incarnation)
            }
            EndCall::KIND => self.handle_keyed::<EndCall, _>(peer, request, |session, _| {
                self.sessions.end(session);
                Ok(((), Bytes::new()))
            }),
            LookupCall::KIND => {
                self.handle_keyed::<LookupCall, _>(peer, request, |session, body| lookup(session, &body))
            }
            ListCall::KIND => self.handle_keyed::<ListCall, _>(peer, request, |session, body| {
                let (listed, packed) = session.listings.part(&body, |dir| session.tree.dir(dir))?;
                Ok((listed, packed.into()))
            }),
            AttrCall::KIND => self.handle_keyed::<AttrCall, _>(peer, request, |session, body| {
                Ok((attrs(session, &body)?, Bytes::new()))
            }),
            ReadCall::KIND => self
                .handle_keyed::<ReadCall, _>(peer, request, |session, body| read(session, &body, |_| true)),
            PagesCall::KIND => self.handle_keyed::<PagesCall, _>(
                peer,
                request,
                |session, ReadPages { read: body, wanted }| {
                    read(session, &body, |number| is_in(&wanted, number))
                },
            ),
            DigestCall::KIND => self.handle_keyed::<DigestCall, _>(peer, request, |session, body| {
                digests(session, &body, self.secret.as_ref())
            }),
            HolesCall::KIND => {
                self.handle_keyed::<HolesCall, _>(peer, request, |session, wanted| holes(session, &wanted))
            }
            ReadlinkCall::KIND => self.handle_keyed::<ReadlinkCall, _>(peer, request, |session, body| {
                Ok((name_changes::readlink(session, &body)?, Bytes::new()))
            }),
            WalkCall::KIND => self.handle_keyed::<WalkCall, _>(peer, request, |session, body| {
                let (walked, packed) = walk(&session.tree, &body)?;
                Ok((walked, packed.into()))
            }),
            StatfsCall::KIND => self.handle_keyed::<StatfsCall, _>(peer, request, |session, ()| {
                Ok((free_space(session)?, Bytes::new()))
            }),
            XattrCall::KIND => self.handle_keyed::<XattrCall, _>(peer, request, |session, body| {
                if matches!(body.action, XattrAction::List | XattrAction::Get(_)) {
                    return xattrs::read(session, &body);
                }
                session.may_change()?;
                let _changing = session.start_change()?;
                xattrs::change(session, &body, &request.payload)
            }),
            WriteCall::KIND | SyncCall::KIND | OpCall::KIND | CopyCall::KIND => self.change(peer, request),
            kind => Err(Refusal::unknown_kind(kind)),
        }
    }

    fn change(&self, peer: &PeerIdentity, request: &Request) -> Answer {
        match request.kind {
            WriteCall::KIND => self.handle_change::<WriteCall, _>(peer, request, |session, body| {
                let _changing = session.start_change()?;
                Ok((WriteDone { attr: write(session, &body, &request.payload)? }, Bytes::new()))
            }),
            SyncCall::KIND => self.handle_change::<SyncCall, _>(peer, request, |session, body| {
                Ok((name_changes::sync(session, &body.file)?, Bytes::new()))
            }),
            CopyCall::KIND => self.handle_change::<CopyCall, _>(peer, request, |session, body| {
                let _changing = session.start_change()?;
                Ok((copy(session, &body)?, Bytes::new()))
            }),
            _ => self.handle_change::<OpCall, _>(peer, request, |session, body| {
                let _changing = session.start_change()?;
                let before = name_changes::version_before(session, &body);
                Ok((name_changes::apply(session, body)?, before))
            }),
        }
    }

    /// Handles a call of a session, if the key is valid.
    fn handle_keyed<C, B>(
        &self,
        peer: &PeerIdentity,
        request: &Request,
        work: impl FnOnce(&Arc<ServedSession>, B) -> Outcome<C>,
    ) -> Answer
    where
        C: Call<Header = Keyed<B>>,
    {
        let Keyed { key, body } = request.decode::<C>()?;
        let session = self.sessions.find(&key, peer, &self.limits)?;
        let (header, payload) = work(&session, body)?;
        Reply::of::<C>(&header, payload)
    }

    /// Handles a call that changes something, if the session may do that.
    fn handle_change<C, B>(
        &self,
        peer: &PeerIdentity,
        request: &Request,
        work: impl FnOnce(&Arc<ServedSession>, B) -> Outcome<C>,
    ) -> Answer
    where
        C: Call<Header = Keyed<B>>,
    {
        self.handle_keyed::<C, B>(peer, request, |session, body| {
            session.may_change()?;
            work(session, body)
        })
    }

    fn open(&self, peer: &PeerIdentity, wanted: &Open, client: &[u8]) -> Outcome<OpenCall> {
        if !SPOKEN.contains(wanted.protocol) {
            let text =
                format!("the server speaks session versions {SPOKEN}, the client speaks {}", wanted.protocol);
            return Err(Refusal::new(code::VERSION, text));
        }
        let client = match client {
            [] => None,
            bytes => Some(
                ClientId::from_bytes(bytes)
                    .ok_or_else(|| Refusal::new(Code::BAD_HEADER, "a client id has 16 bytes"))?,
            ),
        };
        let named = self.exports.iter().filter_map(|export| Some((export, export.below(&wanted.directory)?)));
        // The innermost of nested exports is meant, which has the shortest remaining path.
        let named = named.min_by_key(|(_, path)| path.as_bytes().len());
        let Some((export, path)) = named else {
            return Err(Refusal::new(code::EXPORT, "the directory is not exported here"));
        };
        let Some(access) = export.access(peer) else {
            let text =
                "this key may not mount the directory: `whimbrel serve DIR --allow KEY` there allows it";
            return Err(Refusal::new(Code::FORBIDDEN, text));
        };
        let access = if self.read_only { ExportAccess::Read } else { access };
        let tree = (export.tree(&path, self.limits.ownership)?, access);
        let locks = self.sessions.locks.clone();
        let session = ServedSession::new(peer.clone(), client, tree, &self.limits, locks)?;
        let root = session.tree.lookup(&crate::proto::RelPath::root())?.1;
        let session = self.sessions.add(session, &self.limits);
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let opened = Opened { key: session.key(), root, read_only: access == ExportAccess::Read, uid, gid };
        let mut told = session.tree.incarnation().unwrap_or_default().to_vec();
        if wanted.protocol >= FIRST_WITH_NODES && !told.is_empty() {
            let sets_owners = self.limits.ownership && rustix::process::geteuid().is_root();
            told.push(u8::from(sets_owners));
        }
        Ok((opened, told.into()))
    }
}

fn lookup(session: &ServedSession, wanted: &Lookup) -> Outcome<LookupCall> {
    let Some(name) = &wanted.name else {
        let attr = session.tree.attr(&wanted.dir)?;
        return Ok((LookedUp { attr, listed: false }, Bytes::new()));
    };
    let path = wanted.dir.join(name).map_err(|_| refuse("find the file")(Errno::NAMETOOLONG))?;
    if wanted.list > 0
        && let Some(listing) = Listing::read(session.tree.dir(&wanted.dir)?, wanted.list.min(8192) as usize)?
    {
        let (packed, _) = listing.part(0, u32::MAX)?;
        let attr = session.tree.attr(&path)?;
        return Ok((LookedUp { attr, listed: true }, packed.into()));
    }
    Ok((LookedUp { attr: session.tree.attr(&path)?, listed: false }, Bytes::new()))
}

fn attrs(session: &ServedSession, wanted: &AttrBatch) -> Result<Vec<Option<Attr>>, Refusal> {
    if wanted.paths.len() > MAX_BATCH {
        return Err(refuse("examine so many files at once")(Errno::TOOBIG));
    }
    wanted.paths.iter().map(|path| session.tree.attr(path)).collect()
}

/// Reads the pages of a range that are `lacking`.
fn read(session: &ServedSession, wanted: &Read, lacking: impl Fn(usize) -> bool) -> Outcome<ReadCall> {
    let file = session.files.get(&session.tree, &wanted.file, false)?;
    let (attr, content) = file.read(wanted.range)?;
    let level = wanted.level.map(|level| i32::from(level).clamp(-5, 9));
    let (pages, packed) = pack_some(&content, level, lacking);
    Ok((ReadDone { attr, pages }, packed.into()))
}

fn digests(session: &ServedSession, wanted: &Digests, secret: Option<&[u8; 32]>) -> Outcome<DigestCall> {
    let file = session.files.get(&session.tree, &wanted.file, false)?;
    let (attr, content) = file.read(wanted.range)?;
    let (pages, digests) = pack_digests(&content);
    let share = secret.and_then(|secret| ShareKey::of(secret, &attr));
    Ok((DigestsDone { attr, pages, share }, digests.into()))
}

fn holes(session: &ServedSession, wanted: &FileRef) -> Outcome<HolesCall> {
    let (attr, holes) = session.files.get(&session.tree, wanted, false)?.holes()?;
    Ok((HolesDone { attr }, pack_holes(&holes).into()))
}

fn write(session: &ServedSession, wanted: &Write, payload: &[u8]) -> Result<Attr, Refusal> {
    let content = unpack_pages(&wanted.pages, payload, MAX_RANGE as usize);
    let content = content.map_err(|error| Refusal::new(Code::BAD_HEADER, error.to_string()))?;
    session.files.get(&session.tree, &wanted.file, true)?.write(wanted, &content)
}

fn free_space(session: &ServedSession) -> Result<FilesystemSpace, Refusal> {
    let root = session.tree.dir(&crate::proto::RelPath::root())?;
    let found = rustix::fs::fstatvfs(&root).map_err(refuse("get the free space"))?;
    Ok(FilesystemSpace {
        unit: found.f_frsize,
        total: found.f_blocks,
        free: found.f_bfree,
        available: found.f_bavail,
        files: found.f_files,
        files_free: found.f_ffree,
    })
}

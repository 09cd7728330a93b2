//! Dispatcher: checks the key of each request, then handles it on a thread that may wait for the disk.
//!
//! One server may serve any number of connections and transports. Nothing of it needs to be stored when it
//! ends.

use super::{
    Export, ExportAccess, Limits,
    exports::attr_of,
    file_copy::copy,
    largest_file::largest_file,
    leased_answers::Granting,
    leases::{Leases, without_leases},
    listing::Listing,
    locks::Locks,
    name_changes,
    open_files::MAX_RANGE,
    quota, refuse,
    sessions::{ServedSession, SessionEvent, SessionOutcome, Sessions, unknown_key},
    tree_listing::walk,
    xattrs,
};
use crate::proto::{
    Attr, AttrBatch, AttrCall, ClaimCall, ClientId, CopyCall, DigestCall, Digests, DigestsDone, EndCall,
    FIRST_WITH_LEASES, FIRST_WITH_NODES, FileRef, FilesystemSpace, HolesCall, HolesDone, Keyed, ListCall,
    LockCall, LookedUp, Lookup, LookupCall, OpCall, OpDone, Open, OpenCall, Opened, PagesCall, Read,
    ReadCall, ReadDone, ReadPages, ReadlinkCall, RelPath, ReturnCall, SPOKEN, ShareKey, StatfsCall, SyncCall,
    WalkCall, WatchCall, Write, WriteCall, WriteDone, XattrAction, XattrCall, code, is_in, pack_digests,
    pack_holes, pack_some, request_name, unpack_pages,
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
    leases: Arc<Leases>,
    locks: Arc<Locks>,
    /// Secret for share keys, known to this process only.
    secret: Option<[u8; 32]>,
    calls: CallDurations,
    note: Box<NoteSession>,
}

/// Notes what becomes of sessions.
type NoteSession = dyn Fn(&SessionEvent<'_>) + Send + Sync;

impl Server {
    /// Makes a server of these exports.
    pub fn new(exports: Vec<Export>, read_only: bool, limits: Limits) -> Self {
        Self::with_notes(exports, read_only, limits, |_| {})
    }

    /// Makes a server that tells `note` of each session that it gives, refuses or ends.
    pub fn with_notes(
        exports: Vec<Export>,
        read_only: bool,
        limits: Limits,
        note: impl Fn(&SessionEvent<'_>) + Send + Sync + 'static,
    ) -> Self {
        let secret = limits.share.then(|| rand::rng().random());
        let (leases, locks) = (Leases::new(&limits), Locks::new(limits.lease_term));
        Self {
            shared: Arc::new(Shared {
                exports,
                read_only,
                limits,
                sessions: Sessions::default(),
                leases,
                locks,
                secret,
                calls: CallDurations::default(),
                note: Box::new(note),
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
            if request.kind == WatchCall::KIND {
                return shared.watch(&identity, &request).await;
            }
            let (begun, call) = (Instant::now(), request_name(request.kind).unwrap_or("other"));
            let work = || {
                let (shared, identity, request) = (shared.clone(), identity.clone(), request.clone());
                async move {
                    let work = tokio::task::spawn_blocking(move || shared.answer(&identity, &request));
                    work.await.unwrap_or_else(|_| Err(Refusal::new(Code::INTERNAL, "the handler failed")))
                }
            };
            let answer = shared.leases.when_free(work).await;
            let outcome = if answer.is_ok() { "done" } else { "refused" };
            shared.calls.observe(call, outcome, begun.elapsed());
            answer
        })
    }
}

type Outcome<C> = Result<(<C as Call>::Reply, Bytes), Refusal>;

impl Shared {
    fn answer(&self, peer: &PeerIdentity, request: &Request) -> Answer {
        match request.kind {
            OpenCall::KIND => {
                let (opened, incarnation) = self.open_noted(peer, request)?;
                Reply::of::<OpenCall>(&opened, incarnation)
            }
            EndCall::KIND => self.handle_keyed::<EndCall, _>(peer, request, |session, _| {
                self.sessions.end(session);
                (self.note)(&SessionEvent { peer, directory: &[], outcome: SessionOutcome::Ended });
                session.client().inspect(|client| self.locks.release(client));
                Ok(((), Bytes::new()))
            }),
            LookupCall::KIND => {
                self.handle_keyed::<LookupCall, _>(peer, request, |session, body| lookup(session, &body))
            }
            ListCall::KIND => self.handle_keyed::<ListCall, _>(peer, request, |session, body| {
                let mut granting = session.granting();
                let open = |dir: &RelPath| {
                    let dir = session.tree.dir(dir)?;
                    session.before_read(&[attr_of(&dir)?.ident])?;
                    Ok(dir)
                };
                let (listed, packed) = session.listings.part(&body, &mut granting, open)?;
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
                let (walked, packed) = walk(session, &body)?;
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
                let (granting, file) = (session.granting(), body.file.clone());
                let change = || xattrs::change(session, &body, &request.payload);
                let (attr, before) = session.change(|| vec![file.ident], change)?;
                Ok((granted(session, granting, &file.path, attr)?, before))
            }),
            LockCall::KIND | ReturnCall::KIND | ClaimCall::KIND => self.leases_and_locks(peer, request),
            WriteCall::KIND | SyncCall::KIND | OpCall::KIND | CopyCall::KIND => self.change(peer, request),
            kind => Err(Refusal::unknown_kind(kind)),
        }
    }

    fn leases_and_locks(&self, peer: &PeerIdentity, request: &Request) -> Answer {
        match request.kind {
            LockCall::KIND => self.handle_keyed::<LockCall, _>(peer, request, |session, body| {
                Ok((self.locks.handle(session, &body)?, Bytes::new()))
            }),
            ReturnCall::KIND => self.handle_keyed::<ReturnCall, _>(peer, request, |session, body| {
                Ok((session.returned(&body)?, Bytes::new()))
            }),
            _ => self.handle_change::<ClaimCall, _>(peer, request, |session, body| {
                Ok((session.claim(&body)?, Bytes::new()))
            }),
        }
    }

    fn change(&self, peer: &PeerIdentity, request: &Request) -> Answer {
        match request.kind {
            WriteCall::KIND => self.handle_change::<WriteCall, _>(peer, request, |session, body| {
                let _changing = session.start_change()?;
                let granting = session.granting();
                let write = || write(session, &body, &request.payload);
                let attr = session.change(|| vec![body.file.ident], write)?;
                let attr = granted(session, granting, &body.file.path, attr)?;
                Ok((WriteDone { attr }, Bytes::new()))
            }),
            SyncCall::KIND => self.handle_change::<SyncCall, _>(peer, request, |session, body| {
                Ok((name_changes::sync(session, &body.file)?, Bytes::new()))
            }),
            CopyCall::KIND => self.handle_change::<CopyCall, _>(peer, request, |session, body| {
                let _changing = session.start_change()?;
                session.before_read(&[body.from.ident])?;
                let granting = session.granting();
                let mut done = session.change(|| vec![body.to.ident], || copy(session, &body))?;
                done.attr = granted(session, granting, &body.to.path, done.attr)?;
                Ok((done, Bytes::new()))
            }),
            _ => self.handle_change::<OpCall, _>(peer, request, |session, body| {
                let _changing = session.start_change()?;
                let (mut granting, path) = (session.granting(), body.path().clone());
                let change = || {
                    let before = name_changes::version_before(session, &body);
                    let apply = || name_changes::apply(session, body.clone());
                    Ok((quota::op_within(session, &body, apply)?, before))
                };
                let (done, before) = session.change(|| session.touched(&body), change)?;
                let attr = granting.file(&session.tree, &path, done.attr)?;
                Ok((OpDone { attr }, before))
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

    /// Renews leases, which may take a while without holding a thread.
    async fn watch(&self, peer: &PeerIdentity, request: &Request) -> Answer {
        let Keyed { key, body } = request.decode::<WatchCall>()?;
        let session = self.sessions.find(&key, peer, &self.limits)?;
        let holder = session.holder.ok_or_else(without_leases)?;
        session.client().inspect(|client| self.locks.renew(client));
        drop(session);
        let news = self.leases.watch(holder, &body).await;
        Reply::of::<WatchCall>(&news.ok_or_else(unknown_key)?, Bytes::new())
    }

    /// Opens a session, and notes what becomes of it.
    fn open_noted(&self, peer: &PeerIdentity, request: &Request) -> Outcome<OpenCall> {
        let wanted = request.decode::<OpenCall>()?;
        let opened = self.open(peer, &wanted, &request.payload);
        let outcome = match &opened {
            Ok((opened, _)) if opened.read_only => SessionOutcome::Opened(ExportAccess::Read),
            Ok(_) => SessionOutcome::Opened(ExportAccess::Write),
            Err(refusal) => SessionOutcome::Refused(&refusal.text),
        };
        (self.note)(&SessionEvent { peer, directory: &wanted.directory, outcome });
        opened
    }

    fn open(&self, peer: &PeerIdentity, wanted: &Open, client: &[u8]) -> Outcome<OpenCall> {
        if !SPOKEN.contains(wanted.protocol) {
            let text =
                format!("the server speaks session versions {SPOKEN}, the client speaks {}", wanted.protocol);
            return Err(Refusal::new(code::VERSION, text));
        }
        let client = client_of(client)?;
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
        let leased = wanted.protocol >= FIRST_WITH_LEASES;
        let shared = (self.sessions.locks.clone(), self.leases.clone(), leased);
        let session = ServedSession::new(peer.clone(), client, tree, &self.limits, shared)?;
        let mut granting = session.granting();
        let root = session.tree.lookup(&RelPath::root())?.1;
        let root = granting.file(&session.tree, &RelPath::root(), Some(root))?.unwrap_or(root);
        drop(granting);
        let session = self.sessions.add(session, &self.limits);
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let opened = Opened { key: session.key(), root, read_only: access == ExportAccess::Read, uid, gid };
        let mut told = session.tree.incarnation().unwrap_or_default().to_vec();
        if wanted.protocol >= FIRST_WITH_NODES && !told.is_empty() {
            let sets_owners = self.limits.ownership && rustix::process::geteuid().is_root();
            told.push(u8::from(sets_owners));
            let largest = (!opened.read_only).then(|| largest_file(session.tree.dir(&RelPath::root()).ok()?));
            told.extend(largest.flatten().into_iter().flat_map(u64::to_le_bytes));
        }
        Ok((opened, told.into()))
    }
}

/// The client that opens a session, if it says who it is.
fn client_of(bytes: &[u8]) -> Result<Option<ClientId>, Refusal> {
    match ClientId::from_bytes(bytes) {
        _ if bytes.is_empty() => Ok(None),
        None => Err(Refusal::new(Code::BAD_HEADER, "a client id has 16 bytes")),
        client => Ok(client),
    }
}

/// The attributes of a changed file as they are leased.
fn granted(
    session: &ServedSession,
    mut granting: Granting,
    path: &RelPath,
    attr: Attr,
) -> Result<Attr, Refusal> {
    // If the path leads elsewhere by now, what was changed is not leased.
    let now = granting.file(&session.tree, path, Some(attr))?;
    Ok(now.filter(|now| now.ident == attr.ident).unwrap_or(attr))
}

fn lookup(session: &ServedSession, wanted: &Lookup) -> Outcome<LookupCall> {
    let mut granting = session.granting();
    let Some(name) = &wanted.name else {
        let attr = attr_to_read(session, &wanted.dir, &mut granting)?;
        return Ok((LookedUp { attr, listed: false }, Bytes::new()));
    };
    let path = wanted.dir.join(name).map_err(|_| refuse("find the file")(Errno::NAMETOOLONG))?;
    let dir = session.tree.dir(&wanted.dir)?;
    session.before_read(&[attr_of(&dir)?.ident])?;
    if wanted.list > 0 {
        granting.dir(&dir)?;
        if let Some(listing) = Listing::read(dir, wanted.list.min(8192) as usize)? {
            let (packed, _) = listing.part(0, u32::MAX, &mut granting)?;
            let attr = attr_to_read(session, &path, &mut granting)?;
            return Ok((LookedUp { attr, listed: true }, packed.into()));
        }
    }
    let attr = attr_to_read(session, &path, &mut granting)?;
    Ok((LookedUp { attr, listed: false }, Bytes::new()))
}

/// Attributes of a file, as soon as nobody has changes of it that were not sent yet.
fn attr_to_read(
    session: &ServedSession,
    path: &RelPath,
    granting: &mut Granting,
) -> Result<Option<Attr>, Refusal> {
    let attr = session.tree.attr(path)?;
    session.before_read(attr.map(|attr| attr.ident).as_slice())?;
    granting.file(&session.tree, path, attr)
}

fn attrs(session: &ServedSession, wanted: &AttrBatch) -> Result<Vec<Option<Attr>>, Refusal> {
    if wanted.paths.len() > MAX_BATCH {
        return Err(refuse("examine so many files at once")(Errno::TOOBIG));
    }
    wanted.paths.iter().map(|path| session.tree.attr(path)).collect()
}

/// Reads the pages of a range that are `lacking`.
fn read(session: &ServedSession, wanted: &Read, lacking: impl Fn(usize) -> bool) -> Outcome<ReadCall> {
    session.before_read(&[wanted.file.ident])?;
    let mut granting = session.granting();
    let file = session.files.get(&session.tree, &wanted.file, false)?;
    let (attr, content) = file.read(wanted.range)?;
    granting.content(&session.tree, &wanted.file.path, &attr);
    let level = wanted.level.map(|level| i32::from(level).clamp(-5, 9));
    let (pages, packed) = pack_some(&content, level, lacking);
    Ok((ReadDone { attr, pages }, packed.into()))
}

fn digests(session: &ServedSession, wanted: &Digests, secret: Option<&[u8; 32]>) -> Outcome<DigestCall> {
    session.before_read(&[wanted.file.ident])?;
    let file = session.files.get(&session.tree, &wanted.file, false)?;
    let (attr, content) = file.read(wanted.range)?;
    let (pages, digests) = pack_digests(&content);
    let share = secret.and_then(|secret| ShareKey::of(secret, &attr));
    Ok((DigestsDone { attr, pages, share }, digests.into()))
}

fn holes(session: &ServedSession, wanted: &FileRef) -> Outcome<HolesCall> {
    session.before_read(&[wanted.ident])?;
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
    let space = FilesystemSpace {
        unit: found.f_frsize,
        total: found.f_blocks,
        free: found.f_bfree,
        available: found.f_bavail,
        files: found.f_files,
        files_free: found.f_ffree,
    };
    Ok(session.tree.quota.as_ref().map_or(space, |quota| quota.limit_space(space)))
}

//! Tests of the access to capsules: what a limited host gets of a real store, by digest and over TLS.

use super::*;
use crate::{
    server::peer_rpc::request_table::{HostRequest, authorize},
    transfer::handoff::{ClaimMachine, HandoffSubject},
};
use bytes::Bytes;
use tokio::net::TcpListener;
use whimbrel_core::{ByteSize, MachineConfig, PAGE_SIZE, PageRun};
use whimbrel_image::{FORMAT, ImageRef};
use whimbrel_store::Expected;
use whimbrel_transfer::{BaseImage, Server, protocol::*};
use whimbrel_wire::{
    Answer, BoxFuture, CallError, Connection, Endpoint, Identity, Peer, PublicKey, Refusal, Request, Rights,
    Service, Trust, connect_tls, serve_tls,
};

const PAGES: u64 = 600;

struct Place {
    store: Store,
    _dir: tempfile::TempDir,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), whimbrel_store::Options::create()).unwrap();
    Place { store, _dir: dir }
}

fn caller(read: &str) -> Caller {
    Caller::Peer(Arc::new(TrustedPeer {
        name: "beta".parse().unwrap(),
        key: Some(PublicKey([1; 32])),
        address: None,
        rights: Rights::all(),
        read: Some(read.parse().unwrap()),
        write: None,
    }))
}

impl Place {
    /// A capsule of `machine` whose pages are those of `seed`, but the first is the same in all.
    fn capsule(&self, machine: &str, name: &str, seed: u8, parents: Vec<CapsuleId>) -> CapsuleId {
        let writer = self.store.writer().unwrap();
        let page = |number: u64| {
            let mut page = vec![if number == 0 { 255 } else { seed }; PAGE_SIZE];
            page[..8].copy_from_slice(&number.to_le_bytes());
            page
        };
        let memory: Vec<u8> = (0..PAGES).flat_map(page).collect();
        let mut image = writer.image(None, PAGES).unwrap();
        image.put(PageRun::new(0, PAGES), &memory).unwrap();
        let root = image.finish().unwrap().root;
        let device = vec![writer.put_blob(&[seed; 3000]).unwrap()];
        let machine_config = MachineConfig::minimal(ByteSize(memory.len() as u64));
        let labels = [(refs::MACHINE_LABEL.to_owned(), machine.to_owned())].into();
        let manifest = Manifest {
            format: FORMAT,
            machine: machine_config,
            device,
            images: vec![ImageRef { name: "memory".into(), pages: PAGES, root, cuts: None }],
            parents,
            time: u64::from(seed),
            host: "alpha".into(),
            labels,
            working_set: None,
        };
        writer.commit(&manifest, &[name.parse().unwrap()]).unwrap()
    }

    /// Root, leaves and blob of a capsule.
    fn objects(&self, capsule: &CapsuleId) -> (Digest, Vec<Digest>, Digest) {
        let manifest = self.store.manifest(capsule).unwrap();
        let root = manifest.images[0].root.unwrap();
        let node = Node::decode(&self.store.blob(&root).unwrap()).unwrap();
        (root, node.children().map(|(_, leaf)| leaf).collect(), manifest.device[0])
    }

    fn fetch(&self, access: &CapsuleAccess<'_>, kind: ObjectKind, digest: Digest) -> ObjectAnswer {
        let wants = vec![WantedObject { digest, similar: None }];
        let ask = ObjectsRequest { kind, wants, level: 0, max_bytes: 1 << 20 };
        let request = Request::of::<Objects>(&ask, Bytes::new()).unwrap();
        let reply = Server::new(self.store.clone()).answer(access, &request).unwrap();
        reply.decode::<Objects>().unwrap().objects[0]
    }

    fn leaf(
        &self,
        access: &CapsuleAccess<'_>,
        leaf: Digest,
        similar: Option<Digest>,
        bases: Vec<BaseImage>,
    ) -> LeafAnswer {
        let slots = WantedSlots::These([1].into_iter().collect());
        let wants = vec![WantedLeafPages::Leaf { leaf, similar, slots }];
        let ask = LeafPagesRequest { wants, bases, level: 0, max_bytes: 1 << 20 };
        let request = Request::of::<LeafPages>(&ask, Bytes::new()).unwrap();
        let reply = Server::new(self.store.clone()).answer(access, &request).unwrap();
        reply.decode::<LeafPages>().unwrap().leaves[0]
    }
}

#[test]
fn a_digest_alone_fetches_nothing_of_a_capsule_that_may_not_be_read() {
    let place = place();
    let web = place.capsule("web", "machine.web", 1, vec![]);
    let secret = place.capsule("db", "machine.db", 2, vec![]);
    let (cache, limited, all) = (CapsuleAccessCache::default(), caller("web"), caller("*"));
    let access = CapsuleAccess::new(&place.store, &cache, &limited);
    let anything = CapsuleAccess::new(&place.store, &cache, &all);
    for (capsule, may) in [(web, true), (secret, false)] {
        let (root, leaves, blob) = place.objects(&capsule);
        let objects = [
            (ObjectKind::Manifest, capsule.0),
            (ObjectKind::Blob, capsule.0),
            (ObjectKind::Node, root),
            (ObjectKind::ShortLeaf, leaves[1]),
            (ObjectKind::Blob, root),
            (ObjectKind::Blob, blob),
        ];
        for (kind, digest) in objects {
            let there = place.fetch(&access, kind, digest) != ObjectAnswer::Absent;
            // A manifest is fetched as what it is, and not as a blob.
            let may = may && (kind, digest) != (ObjectKind::Blob, capsule.0);
            assert_eq!(there, may, "{kind:?} of {capsule}");
        }
        let sent = |answer: LeafAnswer| matches!(answer, LeafAnswer::Sent { .. });
        assert_eq!(sent(place.leaf(&access, leaves[1], None, vec![])), may);
        assert!(sent(place.leaf(&anything, leaves[1], None, vec![])));
    }
}

fn access_to(access: &CapsuleAccess<'_>, digest: &Digest) -> bool {
    whimbrel_transfer::Access::may_have(access, digest)
}

#[test]
fn what_may_not_be_read_is_no_base_of_an_answer_either() {
    let place = place();
    let web = place.capsule("web", "machine.web", 1, vec![]);
    let secret = place.capsule("db", "machine.db", 2, vec![]);
    let (cache, limited) = (CapsuleAccessCache::default(), caller("web"));
    let access = CapsuleAccess::new(&place.store, &cache, &limited);
    let ((_, leaves, _), (root, foreign, _)) = (place.objects(&web), place.objects(&secret));
    let bases = vec![BaseImage { root, pages: PAGES }];
    match place.leaf(&access, leaves[1], Some(foreign[1]), bases) {
        LeafAnswer::Sent { delta, .. } => assert!(!delta, "coded against pages of another machine"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_clone_is_read_without_the_capsule_that_it_comes_from() {
    let place = place();
    let golden = place.capsule("golden", "golden", 1, vec![]);
    let first = place.capsule("web", "machine.web", 2, vec![golden]);
    let second = place.capsule("web", "machine.web", 3, vec![first]);
    let (cache, limited) = (CapsuleAccessCache::default(), caller("web"));
    let allowed = |capsule: &CapsuleId| {
        let access = CapsuleAccess::new(&place.store, &cache, &limited);
        whimbrel_transfer::Access::allowed(&access, capsule)
    };
    assert!(allowed(&second), "the newest of the machine");
    assert!(allowed(&first), "an older one, which a host may still be fetching");
    assert!(!allowed(&golden), "the capsule that another machine was cloned from");
    let access = CapsuleAccess::new(&place.store, &cache, &limited);
    let (shared, alone) = (place.objects(&first).1, place.objects(&golden).1);
    assert!(access_to(&access, &shared[0]) && !access_to(&access, &alone[0]));
}

#[test]
fn a_right_that_is_taken_away_and_a_name_that_is_given_count_at_once() {
    let place = place();
    let secret = place.capsule("db", "machine.db", 2, vec![]);
    let (root, ..) = place.objects(&secret);
    let cache = CapsuleAccessCache::default();
    let may = |read: &str| access_to(&CapsuleAccess::new(&place.store, &cache, &caller(read)), &root);
    assert!(may("db") && !may("web") && may("db,web") && !may("web"));
    place.store.set_ref(&"web".parse().unwrap(), &secret, Expected::Anything).unwrap();
    assert!(may("web"), "what is not found is looked for again");
    assert!(!access_to(&CapsuleAccess::new(&place.store, &cache, &Caller::Stranger), &root));
}

#[test]
fn what_a_machine_elsewhere_runs_from_is_read_without_its_name_as_long_as_the_machine_may_be_read() {
    let place = place();
    let web = place.capsule("web", "machine.web", 1, vec![]);
    let cache = CapsuleAccessCache::default();
    let allowed = |read: &str| {
        let caller = caller(read);
        whimbrel_transfer::Access::allowed(&CapsuleAccess::new(&place.store, &cache, &caller), &web)
    };
    place.store.set_ref(&"reader.gamma.1".parse().unwrap(), &web, Expected::Absent).unwrap();
    place.store.delete_ref(&"machine.web".parse().unwrap(), Expected::Anything).unwrap();
    assert!(!allowed("web"), "a pin for another host");
    place.store.set_ref(&"reader.beta.1".parse().unwrap(), &web, Expected::Absent).unwrap();
    assert!(allowed("web") && !allowed("db"));
}

#[test]
fn existence_is_told_only_of_what_may_be_read() {
    let place = place();
    let web = place.capsule("web", "machine.web", 1, vec![]);
    let secret = place.capsule("db", "machine.db", 2, vec![]);
    let (cache, limited) = (CapsuleAccessCache::default(), caller("web"));
    let access = CapsuleAccess::new(&place.store, &cache, &limited);
    let digests = [web.0, place.objects(&web).0, secret.0, place.objects(&secret).0];
    let asked: Vec<u8> = digests.iter().flat_map(|digest| digest.0).collect();
    let request = Request::of::<HasObjects>(&(), asked.into()).unwrap();
    let reply = Server::new(place.store.clone()).answer(&access, &request).unwrap();
    assert_eq!(reply.payload[..], [0b0011]);
}

/// Judges and answers as the daemon does, without one.
struct Host {
    place: Place,
    cache: CapsuleAccessCache,
    trust: Arc<Trust>,
}

struct HostService(Arc<Host>);

impl Host {
    fn answer(&self, peer: &Peer, request: &Request) -> Answer {
        let caller = Caller::find(&self.trust, &peer.identity, &peer.name);
        let kind = HostRequest::of(request.kind).ok_or_else(|| Refusal::unknown_kind(request.kind))?;
        authorize(&caller, kind, request, |_| false)?;
        let access = CapsuleAccess::new(&self.place.store, &self.cache, &caller);
        Server::new(self.place.store.clone()).answer(&access, request)
    }
}

impl Service for HostService {
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        Box::pin(async move { self.0.answer(peer, &request) })
    }

    fn admits(&self, _: &Peer, _: u16) -> bool {
        true
    }
}

/// Passes on the far side of each connection.
struct Far(tokio::sync::mpsc::UnboundedSender<Connection>);

impl Service for Far {
    fn handle<'a>(&'a self, _: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        Box::pin(async move { Err(Refusal::unknown_kind(request.kind)) })
    }

    fn connected(&self, connection: Connection) {
        let _ = self.0.send(connection);
    }
}

fn entry(name: &str, identity: &Identity, read: Option<&str>) -> TrustedPeer {
    TrustedPeer {
        name: name.parse().unwrap(),
        key: Some(identity.public_key()),
        address: None,
        rights: Rights::all(),
        read: read.map(|read| read.parse().unwrap()),
        write: None,
    }
}

/// Serves on loopback; returns the address.
async fn listen(identity: &Arc<Identity>, trust: &Arc<Trust>, endpoint: Endpoint) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (identity, trust) = (identity.clone(), trust.clone());
    tokio::spawn(async move { serve_tls(listener, &identity, trust, endpoint).await });
    address
}

async fn node(connection: &Connection, digest: Digest) -> Option<ObjectAnswer> {
    let wants = vec![WantedObject { digest, similar: None }];
    let ask = ObjectsRequest { kind: ObjectKind::Node, wants, level: 0, max_bytes: 1 << 20 };
    match connection.request::<Objects>(&ask, Bytes::new()).await {
        Ok((reply, _)) => Some(reply.objects[0]),
        Err(CallError::Closed { .. }) => None,
        other => panic!("{other:?}"),
    }
}

async fn is_forbidden(connection: &Connection, machine: &str, capsule: CapsuleId) -> bool {
    let subject = HandoffSubject { machine: machine.parse().unwrap(), capsule };
    match connection.request::<ClaimMachine>(&subject, Bytes::new()).await {
        Err(CallError::Refused { source }) => source.code == whimbrel_wire::Code::FORBIDDEN,
        other => panic!("{other:?}"),
    }
}

/// Alpha has two machines and lets beta read one of them. Beta asks over a connection that it made, and over
/// one that alpha made.
#[tokio::test(flavor = "multi_thread")]
async fn over_tls_a_forbidden_object_is_absent_whoever_made_the_connection() {
    let place = place();
    let web = place.capsule("web", "machine.web", 1, vec![]);
    let secret = place.capsule("db", "machine.db", 2, vec![]);
    let (open, closed) = (place.objects(&web).0, place.objects(&secret).0);
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [alpha, beta] = dirs.each_ref().map(|dir| Arc::new(Identity::load_or_create(dir.path()).unwrap()));
    let [trust, theirs] = dirs.each_ref().map(|dir| Arc::new(Trust::load(dir.path()).unwrap()));
    trust.add(entry("beta", &beta, Some("web"))).unwrap();
    theirs.add(entry("alpha", &alpha, None)).unwrap();
    let host = Arc::new(Host { place, cache: CapsuleAccessCache::default(), trust: trust.clone() });
    let near = || Endpoint::new("alpha".parse().unwrap(), HostService(host.clone()));
    let address = listen(&alpha, &trust, near()).await;
    // Beta calls itself by another name, which changes nothing.
    let liar = Endpoint::new("gamma".parse().unwrap(), ());
    let accepted = connect_tls(&address, alpha.public_key(), &beta, &liar).await.unwrap();
    let (sender, mut arrived) = tokio::sync::mpsc::unbounded_channel();
    let far = Endpoint::new("gamma".parse().unwrap(), Far(sender));
    let address = listen(&beta, &theirs, far).await;
    let endpoint = near().with_trust(trust.clone());
    let _dialled_here = connect_tls(&address, beta.public_key(), &alpha, &endpoint).await.unwrap();
    let dialled = arrived.recv().await.unwrap();
    for (way, connection) in [("accepted", &accepted), ("dialled", &dialled)] {
        assert!(matches!(node(connection, open).await, Some(ObjectAnswer::Whole(_))), "{way}");
        assert_eq!(node(connection, closed).await, Some(ObjectAnswer::Absent), "{way}");
        assert!(is_forbidden(connection, "web", web).await, "{way}: to read is not to take away");
    }
    trust.limit(&"beta".parse().unwrap(), (Some("db".parse().unwrap()), None)).unwrap();
    for (way, connection) in [("accepted", &accepted), ("dialled", &dialled)] {
        // The connection may have been cut already.
        let after = node(connection, open).await;
        assert!(matches!(after, Some(ObjectAnswer::Absent) | None), "{way}: {after:?}");
    }
}

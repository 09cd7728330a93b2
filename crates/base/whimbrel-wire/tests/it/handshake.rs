//! Tests of the handshake: untrusted peers, impostors, old versions, garbage, and peers that stall at every
//! step.

use crate::hosts::*;
use bytes::Bytes;
use std::{sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use whimbrel_wire::{
    CallError, CloseReason, Code, ConnectError, ConnectStep, HelloError, Identity, PeerIdentity, Protocol,
    PublicKey, Request, Rights, Version, VersionRange, connect_io, connect_tls,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_is_refused_and_told_which_key_to_have_trusted() {
    let host = host().await;
    let stranger = Identity::ephemeral().unwrap();
    match soon(host.connect_as(&stranger, &endpoint("stranger"))).await {
        Err(ConnectError::NotTrusted { ours }) => assert_eq!(ours, stranger.public_key()),
        other => panic!("{other:?}"),
    }
    host.admit("friend", &stranger, Rights::all());
    let connection =
        soon(host.connect_as(&stranger, &endpoint("liar"))).await.expect("trust needs no restart");
    assert_eq!(connection.peer().identity, PeerIdentity::Key(host.identity.public_key()));
    host.trust.remove(&"friend".parse().unwrap()).unwrap();
    assert!(soon(host.connect_as(&stranger, &endpoint("stranger"))).await.is_err(), "nor does distrust");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_goes_by_the_name_it_is_trusted_under_not_the_one_it_claims() {
    let host = host_with(|_| (), true).await;
    let identity = Identity::ephemeral().unwrap();
    host.admit("beta", &identity, Rights::all());
    let _connection = host.connect_as(&identity, &endpoint("alpha")).await.unwrap();
    let seen = host.far_side().await;
    assert_eq!(seen.peer().name.as_str(), "beta");
    assert_eq!(seen.peer().identity, PeerIdentity::Key(identity.public_key()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_with_another_key_is_not_talked_to() {
    let host = host().await;
    let identity = Identity::ephemeral().unwrap();
    host.admit("client", &identity, Rights::all());
    let pinned = PublicKey([3; 32]);
    match soon(connect_tls(&host.address, pinned, &identity, &endpoint("client"))).await {
        Err(ConnectError::WrongKey { expected, presented }) => {
            assert_eq!((expected, presented), (pinned, host.identity.public_key()));
        }
        other => panic!("{other:?}"),
    }
}

/// The man in the middle is trusted by both, under its own key, and still cannot stand in for either.
#[tokio::test(flavor = "multi_thread")]
async fn a_man_in_the_middle_with_a_trusted_key_of_its_own_is_found_out() {
    let (middle, real) = (host().await, host().await);
    let client = Identity::ephemeral().unwrap();
    for host in [&middle, &real] {
        host.admit("client", &client, Rights::all());
    }
    real.admit("middle", &middle.identity, Rights::all());
    let near = endpoint("client");
    let diverted = connect_tls(&middle.address, real.identity.public_key(), &client, &near);
    match soon(diverted).await {
        Err(ConnectError::WrongKey { presented, .. }) => assert_eq!(presented, middle.identity.public_key()),
        other => panic!("{other:?}"),
    }
}

/// A certificate is public: whoever shows another's must fail for want of its secret.
#[tokio::test(flavor = "multi_thread")]
async fn a_copied_certificate_without_its_secret_is_worthless() {
    use rustls::sign::{CertifiedKey, SigningKey, SingleCertAndKey};
    let victim = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let key = PublicKey(victim.public_key_raw().try_into().unwrap());
    let certificate =
        rcgen::CertificateParams::new(vec!["x".to_owned()]).unwrap().self_signed(&victim).unwrap();
    let thief = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let secret = rustls::pki_types::PrivateKeyDer::try_from(thief.serialize_der()).unwrap();
    let signing: Arc<dyn SigningKey> = rustls::crypto::aws_lc_rs::sign::any_supported_type(&secret).unwrap();
    let stolen = CertifiedKey::new(vec![certificate.der().clone()], signing);
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(stolen)));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let impostor =
        tokio::spawn(async move { acceptor.accept(listener.accept().await.unwrap().0).await.is_ok() });
    let identity = Identity::ephemeral().unwrap();
    match soon(connect_tls(&address, key, &identity, &endpoint("client"))).await {
        Err(ConnectError::Tls { source: rustls::Error::InvalidCertificate(cause) }) => {
            assert_eq!(cause, rustls::CertificateError::BadSignature);
        }
        other => panic!("{other:?}"),
    }
    assert!(!soon(impostor).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_common_version_both_sides_learn_both_ranges() {
    let host = host().await;
    let identity = Identity::ephemeral().unwrap();
    host.admit("old", &identity, Rights::all());
    let mut old = endpoint("old");
    old.versions = VersionRange { oldest: 90, newest: 99 };
    match soon(host.connect_as(&identity, &old)).await {
        Err(ConnectError::Hello { source: HelloError::NoCommonVersion { ours, theirs } }) => {
            assert_eq!((ours, theirs), (old.versions, VersionRange::OURS));
        }
        other => panic!("{other:?}"),
    }
}

const VERSIONS_OF_HOST: &[Version] = &[Version { number: 2, reason: "a test" }];
const VERSIONS_OF_PEER: &[Version] = &[Version { number: 3, reason: "a test" }];

#[tokio::test(flavor = "multi_thread")]
async fn calls_of_an_engine_without_a_common_version_are_refused_on_both_sides_and_no_others() {
    let protocol = |kind, versions| Protocol { name: "test", kinds: (kind, kind), versions };
    let speaks = vec![protocol(ECHO, VERSIONS_OF_HOST)];
    let host = host_with(|endpoint| endpoint.protocols = speaks, false).await;
    let identity = Identity::ephemeral().unwrap();
    host.admit("peer", &identity, Rights::all());
    // One peer of another version, and one that lists no versions: only the host can refuse that one.
    let newer = endpoint("peer").with_protocols([protocol(ECHO, VERSIONS_OF_PEER)]);
    for (peer, theirs) in [(newer, "3 to 3"), (endpoint("peer"), "1 to 1")] {
        let connection = soon(host.connect_as(&identity, &peer)).await.unwrap();
        let refused = soon(connection.call(Request::new(ECHO, Bytes::new(), Bytes::new()))).await;
        let Err(CallError::Refused { source }) = refused else { panic!("{refused:?}") };
        assert_eq!(source.code, Code::VERSION);
        assert!(source.text.contains("2 to 2") && source.text.contains(theirs), "{}", source.text);
        let other = soon(connection.call(Request::new(RECORD, Bytes::new(), Bytes::new()))).await;
        assert!(other.is_ok(), "{other:?}");
    }
}

async fn hello_after(bytes: &[u8]) -> Result<(), ConnectError> {
    let (near, far) = tokio::io::duplex(1 << 16);
    let (reader, writer) = tokio::io::split(near);
    let (_far_reader, mut far_writer) = tokio::io::split(far);
    far_writer.write_all(bytes).await.unwrap();
    far_writer.shutdown().await.unwrap();
    let hello = async {
        connect_io(reader, writer, PeerIdentity::Stdio, Rights::all(), &endpoint("x")).await.map(|_| ())
    };
    soon(hello).await
}

#[tokio::test]
async fn garbage_instead_of_a_hello_is_shown() {
    for garbage in ["Welcome to server 7! You have mail.\n", "bash: whimbrel: not found\n", "hm"] {
        match hello_after(garbage.as_bytes()).await {
            Err(ConnectError::Hello { source: HelloError::NotWhimbrel { start } }) => {
                assert!(start.starts_with(&garbage[..2]), "{start}");
            }
            other => panic!("{other:?}"),
        }
    }
    let torn = hello_after(b"").await;
    assert!(matches!(torn, Err(ConnectError::Io { step: ConnectStep::Hello, .. })), "{torn:?}");
    let huge = hello_after(b"WHIMBREL\xff\xff\x01\0\x01\0\x01\x01\0\0\0\x02\0\0\0\0").await;
    assert!(matches!(huge, Err(ConnectError::Hello { source: HelloError::Malformed { .. } })), "{huge:?}");
    let narrow = hello_after(b"WHIMBREL\x19\0\x01\0\x01\0\x01\x01\x10\0\0\0\0\0\0\0x").await;
    assert!(matches!(narrow, Err(ConnectError::Hello { source: HelloError::Malformed { field: "window" } })));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stalls_in_the_handshake_is_cut_and_blocks_nobody() {
    let short = Duration::from_millis(300);
    let host = host_with(|endpoint| endpoint.settings.handshake = short, false).await;
    let mut stalled = Vec::new();
    for bytes in [&b""[..], b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"] {
        let mut stream = TcpStream::connect(&host.address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stalled.push(stream);
    }
    soon(host.client().await.call(request(ECHO, [], Vec::new()))).await.unwrap();
    for mut stream in stalled {
        let mut rest = Vec::new();
        // An end or a reset: in both cases the host closed the stream.
        let _ = soon(stream.read_to_end(&mut rest)).await;
        assert!(rest.len() < 100, "an alert at most");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn more_stalled_strangers_than_places_do_not_delay_a_friend() {
    // No stalled handshake ends by itself during the test.
    let change = |endpoint: &mut whimbrel_wire::Endpoint| {
        endpoint.settings.handshake = Duration::from_secs(3600);
        endpoint.settings.max_handshakes = 2;
    };
    let host = host_with(change, false).await;
    let mut strangers = Vec::new();
    for _ in 0..64 {
        strangers.push(TcpStream::connect(&host.address).await.unwrap());
    }
    let identity = Identity::ephemeral().unwrap();
    host.admit("friend", &identity, Rights::all());
    soon(host.connect_as(&identity, &endpoint("friend"))).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stalls_is_given_up_at_every_stage() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut impatient = endpoint("client");
    impatient.settings.handshake = Duration::from_millis(200);
    let identity = Identity::ephemeral().unwrap();
    let silent = soon(connect_tls(&address, PublicKey([1; 32]), &identity, &impatient)).await;
    assert!(matches!(silent, Err(ConnectError::Timeout { stage: ConnectStep::Tls, .. })), "{silent:?}");
    let (near, _far) = tokio::io::duplex(1 << 16);
    let (reader, writer) = tokio::io::split(near);
    let silent = soon(connect_io(reader, writer, PeerIdentity::Stdio, Rights::all(), &impatient)).await;
    assert!(matches!(silent, Err(ConnectError::Timeout { stage: ConnectStep::Hello, .. })), "{silent:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_stalls_mid_frame_is_cut_after_the_deadline() {
    let (near, far) = tokio::io::duplex(1 << 16);
    let (reader, writer) = tokio::io::split(near);
    let (mut far_reader, mut far_writer) = tokio::io::split(far);
    far_writer.write_all(b"WHIMBREL\x19\0\x01\0\x01\0\x01\x01\0\0\0\x02\0\0\0\0x").await.unwrap();
    far_writer.write_all(b"Wf\0\0\x01\x06\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\x80\0half").await.unwrap();
    let mut impatient = endpoint("server");
    impatient.settings.dead_after = Duration::from_millis(200);
    let reading = tokio::spawn(async move { far_reader.read_to_end(&mut Vec::new()).await.is_ok() });
    let connection =
        connect_io(reader, writer, PeerIdentity::Stdio, Rights::all(), &impatient).await.unwrap();
    let reason = soon(connection.closed()).await;
    assert!(matches!(reason, CloseReason::Dead { .. }), "{reason:?}");
    assert!(soon(reading).await.unwrap(), "the stream is let go");
}

//! The bytes of transfer messages stay as long as their version does.

use whimbrel_transfer::protocol::{
    BlobRange, HasObjects, LeafPages, ListRefs, Objects, PROTOCOL, RemotePull, RemotePullStatus, Retain,
};
use whimbrel_wire::golden::{call, check};

#[test]
fn messages_keep_their_bytes_as_long_as_their_version_stays() {
    let samples = [
        ("ListRefs", call::<ListRefs>()),
        ("HasObjects", call::<HasObjects>()),
        ("Objects", call::<Objects>()),
        ("BlobRange", call::<BlobRange>()),
        ("LeafPages", call::<LeafPages>()),
        ("RemotePull", call::<RemotePull>()),
        ("RemotePullStatus", call::<RemotePullStatus>()),
        ("Retain", call::<Retain>()),
    ];
    check(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/messages.txt"), PROTOCOL.range(), &samples);
}

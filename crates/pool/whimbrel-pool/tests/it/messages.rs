//! The bytes of pool messages stay as long as their version does.

use whimbrel_pool::protocol::{
    Change, CommitFile, CopyChunks, Drain, DropVersion, EndSession, FindChunks, FindGarbage, FindReusable,
    FlushChunks, GetChunk, GetNode, GetPolicy, GetStatus, Heartbeat, HoldPin, List, ListPins, ListScrubs,
    Locate, Lookup, MakeNode, Node, PROTOCOL, Pin, PinInfo, Purge, Purged, PutChunks, ReadMap,
    RegisterChunks, ReleasePin, Remove, Rename, ReportDamage, ReportFault, ReportScrub, RequestHeartbeat,
    ReserveSpace, SetPolicy, VersionInfo, Versions,
};
use whimbrel_wire::golden::{call, check, sample};

#[test]
fn messages_keep_their_bytes_as_long_as_their_version_stays() {
    let samples = [
        ("Heartbeat", call::<Heartbeat>()),
        ("FindGarbage", call::<FindGarbage>()),
        ("ReserveSpace", call::<ReserveSpace>()),
        ("FindChunks", call::<FindChunks>()),
        ("RegisterChunks", call::<RegisterChunks>()),
        ("CommitFile", call::<CommitFile>()),
        ("EndSession", call::<EndSession>()),
        ("FindReusable", call::<FindReusable>()),
        ("Lookup", call::<Lookup>()),
        ("GetNode", call::<GetNode>()),
        ("List", call::<List>()),
        ("MakeNode", call::<MakeNode>()),
        ("Remove", call::<Remove>()),
        ("Rename", call::<Rename>()),
        ("Change", call::<Change>()),
        ("Versions", call::<Versions>()),
        ("ReadMap", call::<ReadMap>()),
        ("Locate", call::<Locate>()),
        ("ReportFault", call::<ReportFault>()),
        ("GetPolicy", call::<GetPolicy>()),
        ("SetPolicy", call::<SetPolicy>()),
        ("Purge", call::<Purge>()),
        ("Pin", call::<Pin>()),
        ("GetStatus", call::<GetStatus>()),
        ("DropVersion", call::<DropVersion>()),
        ("Drain", call::<Drain>()),
        ("HoldPin", call::<HoldPin>()),
        ("ReleasePin", call::<ReleasePin>()),
        ("ListPins", call::<ListPins>()),
        ("ReportScrub", call::<ReportScrub>()),
        ("ReportDamage", call::<ReportDamage>()),
        ("ListScrubs", call::<ListScrubs>()),
        ("PutChunks", call::<PutChunks>()),
        ("GetChunk", call::<GetChunk>()),
        ("FlushChunks", call::<FlushChunks>()),
        ("CopyChunks", call::<CopyChunks>()),
        ("RequestHeartbeat", call::<RequestHeartbeat>()),
        ("list of nodes", sample::<Vec<Node>>()),
        ("list of versions", sample::<Vec<VersionInfo>>()),
        ("list of purged versions", sample::<Vec<Purged>>()),
        ("list of pins", sample::<Vec<PinInfo>>()),
    ];
    check(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/messages.txt"), PROTOCOL.range(), &samples);
}

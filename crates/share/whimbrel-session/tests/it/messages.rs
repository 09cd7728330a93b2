//! The bytes of session messages stay as long as their version does.

use whimbrel_session::proto::{
    AttrCall, ClaimCall, CopyCall, DigestCall, EndCall, HolesCall, ListCall, LockCall, LookupCall, OpCall,
    OpenCall, PagesCall, ReadCall, ReadlinkCall, ReturnCall, SPOKEN, StatfsCall, SyncCall, WalkCall,
    WatchCall, WriteCall, XattrCall,
};
use whimbrel_wire::golden::{call, check};

#[test]
fn messages_keep_their_bytes_as_long_as_their_version_stays() {
    let samples = [
        ("Open", call::<OpenCall>()),
        ("End", call::<EndCall>()),
        ("Lookup", call::<LookupCall>()),
        ("List", call::<ListCall>()),
        ("Attr", call::<AttrCall>()),
        ("Read", call::<ReadCall>()),
        ("Write", call::<WriteCall>()),
        ("Sync", call::<SyncCall>()),
        ("Op", call::<OpCall>()),
        ("Readlink", call::<ReadlinkCall>()),
        ("Statfs", call::<StatfsCall>()),
        ("Walk", call::<WalkCall>()),
        ("Digest", call::<DigestCall>()),
        ("Pages", call::<PagesCall>()),
        ("Holes", call::<HolesCall>()),
        ("Copy", call::<CopyCall>()),
        ("Xattr", call::<XattrCall>()),
        ("Watch", call::<WatchCall>()),
        ("Return", call::<ReturnCall>()),
        ("Claim", call::<ClaimCall>()),
        ("Lock", call::<LockCall>()),
    ];
    check(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/messages.txt"), SPOKEN, &samples);
}

//! The bytes of protection messages stay as long as their version does.

use whimbrel_protect::{lease::WitnessReply, protocol::*};
use whimbrel_wire::golden::{check, message, sample};

#[test]
fn messages_keep_their_bytes_as_long_as_their_version_stays() {
    let samples = [
        ("START", message(START, [sample::<StartRequest>(), sample::<StartReply>()])),
        ("BLOB", message(BLOB, [sample::<Blob>()])),
        ("COMPARE_DIGESTS", message(COMPARE_DIGESTS, [sample::<Compare>()])),
        ("EPOCH_PAGES", message(EPOCH_PAGES, [sample::<EpochPages>(), sample::<PagesToResend>()])),
        ("EPOCH_END", message(EPOCH_END, [sample::<EpochEnd>()])),
        ("HEARTBEAT", message(HEARTBEAT, [sample::<ProtectionId>(), sample::<HeartbeatReply>()])),
        ("END", message(END, [sample::<EndProtection>(), sample::<StandbyOutcome>()])),
        ("YIELD", message(YIELD, [sample::<ProtectionId>(), sample::<StandbyOutcome>()])),
        ("WITNESS", message(WITNESS, [sample::<WitnessRequest>(), sample::<WitnessReply>()])),
        ("INPUTS", message(INPUTS, [sample::<InputFrames>()])),
    ];
    check(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/messages.txt"), PROTOCOL.range(), &samples);
}

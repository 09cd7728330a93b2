//! The bytes of migration messages stay as long as their version does.

use whimbrel_migrate::{
    late_frames::LateFramesHeader,
    postcopy::messages::*,
    protocol::{
        ABORT, BOOT_FILE, BOOT_FILE_PAGES, BootFileRange, COMMIT, COMMIT_OR_RETURN, CommitReply, EARLY_STATE,
        FINISH, FilePages, FinishHeader, HandoverId, LATE_FRAMES, OFFER, Offer, Offered, PAGES, PROTOCOL,
        PageQuery, PageQueryReply, PagesHeader, Prepared, QUERY_PAGES, RunningSince,
    },
};
use whimbrel_wire::golden::{check, message, sample};

#[test]
fn messages_keep_their_bytes_as_long_as_their_version_stays() {
    let samples = [
        ("OFFER", message(OFFER, [sample::<Offer>(), sample::<Offered>()])),
        ("BOOT_FILE", message(BOOT_FILE, [sample::<BootFileRange>()])),
        ("PAGES", message(PAGES, [sample::<PagesHeader>()])),
        ("FINISH", message(FINISH, [sample::<FinishHeader>(), sample::<Prepared>()])),
        ("COMMIT", message(COMMIT, [sample::<HandoverId>(), sample::<RunningSince>()])),
        ("COMMIT_OR_RETURN", message(COMMIT_OR_RETURN, [sample::<HandoverId>(), sample::<CommitReply>()])),
        ("ABORT", message(ABORT, [sample::<HandoverId>()])),
        ("MISSING_PAGES", message(MISSING_PAGES, [sample::<MissingPages>()])),
        ("QUERY_PAGES", message(QUERY_PAGES, [sample::<PageQuery>(), sample::<PageQueryReply>()])),
        ("EARLY_STATE", message(EARLY_STATE, [sample::<HandoverId>()])),
        ("BOOT_FILE_PAGES", message(BOOT_FILE_PAGES, [sample::<FilePages>()])),
        ("LATE_FRAMES", message(LATE_FRAMES, [sample::<LateFramesHeader>()])),
        ("OFFER_FETCH", message(OFFER_FETCH, [sample::<OfferFetch>(), sample::<OfferFetchReply>()])),
        ("FETCH", message(FETCH, [sample::<Fetch>(), sample::<Fetched>()])),
        ("COMPLETE", message(COMPLETE, [sample::<HandoverId>()])),
    ];
    check(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/messages.txt"), PROTOCOL.range(), &samples);
}

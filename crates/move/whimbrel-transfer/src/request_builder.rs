//! Request builder: turns the items of a pull plan into a request of the wire protocol.

use crate::{
    BaseImage, Content, LinkError,
    link_meter::level,
    protocol::*,
    pull_plan::{FetchItem, FetchRequest},
};
use bytes::Bytes;
use std::sync::OnceLock;
use whimbrel_wire::Request;

/// Replies that are coded at once: a window is about two of them.
const PARALLEL_REPLIES: usize = 2;

/// Processors that code for one link. Only those of this host are known; the holder's are probably as many.
fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    let here = || std::thread::available_parallelism().map_or(1, |cores| cores.get().min(PARALLEL_REPLIES));
    *CORES.get_or_init(here)
}

/// Builds the request for `ask`; pages may be coded against those of `bases`.
pub(crate) fn request(
    ask: &FetchRequest,
    rate: Option<u64>,
    bases: &[BaseImage],
) -> Result<Request, LinkError> {
    let max_bytes = ask.max_bytes.min(u64::from(ANSWER_BYTES)) as u32;
    let items = ask.items.iter().map(|queued| &queued.item);
    let plain = level(rate, cores(), Content::Plain);
    let built = match ask.items.first().map(|queued| &queued.item) {
        Some(FetchItem::Object(kind, _)) => {
            let wants = items.filter_map(|item| match item {
                FetchItem::Object(_, want) => Some(*want),
                _ => None,
            });
            // Digests do not compress; a manifest and a blob are worth some time.
            let digests = matches!(kind, ObjectKind::Node | ObjectKind::ShortLeaf);
            let level = if digests { 1 } else { plain };
            let ask = ObjectsRequest { kind: *kind, wants: wants.collect(), level, max_bytes };
            Request::of::<Objects>(&ask, Bytes::new())
        }
        Some(FetchItem::BlobRange { digest, offset, total }) => {
            let ask = blob_range_request(*digest, *offset, *total, ask.max_bytes, plain);
            Request::of::<BlobRange>(&ask, Bytes::new())
        }
        _ => {
            let delta = items.clone().any(|item| !matches!(item, FetchItem::Pages { similar: None, .. }));
            let level = if delta { level(rate, cores(), Content::Delta) } else { plain };
            let wants = items.filter_map(want).collect();
            let ask = LeafPagesRequest { wants, bases: bases.to_vec(), level, max_bytes };
            Request::of::<LeafPages>(&ask, Bytes::new())
        }
    };
    Ok(built?)
}

/// Next range of a blob: as much as probably fits a reply once it is compressed.
pub(crate) fn blob_range_request(
    digest: whimbrel_core::Digest,
    offset: u64,
    total: u64,
    room: u64,
    level: i8,
) -> BlobRangeRequest {
    let len = (room * 2).min(total - offset.min(total)).min(RAW_MAX as u64 / 2) as u32;
    BlobRangeRequest { digest, offset, len, level }
}

fn want(item: &FetchItem) -> Option<WantedLeafPages> {
    match item {
        FetchItem::Children { node, similar, children } => {
            Some(WantedLeafPages::Children { node: *node, similar: *similar, children: *children })
        }
        FetchItem::Leaf { leaf, similar } => Some(WantedLeafPages::Leaf {
            leaf: *leaf,
            similar: Some(*similar),
            slots: WantedSlots::Differing,
        }),
        FetchItem::Pages { leaf, similar, slots } => {
            Some(WantedLeafPages::Leaf { leaf: *leaf, similar: *similar, slots: WantedSlots::These(*slots) })
        }
        FetchItem::Object(..) | FetchItem::BlobRange { .. } => None,
    }
}

//! A benefactor: a process that offers spare disk to the pool. It stores and serves chunks, and asks the
//! manager which ones it can delete.

mod backups;
mod bucket;
mod chunk_store;
mod compaction;
mod error;
mod manager_reports;
mod pool_id_file;
mod process;
mod readahead;
mod remote_segments;
mod scrub;
mod scrub_reports;
mod segment;
mod segment_check;
mod segment_heads;
mod segment_reader;
mod service;
mod shards;

pub use bucket::{Bucket, ObjectEntry, TierError, TierOptions, TierOwner, TierUrl, TierUrlError};
pub use chunk_store::{ChunkStore, Usage};
pub use error::ChunkError;
pub use process::{Benefactor, BenefactorError, BenefactorOptions};
pub use remote_segments::ObjectTier;
pub use scrub::{Scrub, ScrubOptions};
pub use segment::{FrameFault, open_frame};
pub(crate) use segment::{check_frame, open_shared};
pub use service::BenefactorService;

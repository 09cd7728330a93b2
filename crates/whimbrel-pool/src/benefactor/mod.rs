//! A benefactor: spare disk given to the pool. It keeps chunks, serves them, and asks the manager which may go.

mod ahead;
mod chunks;
mod error;
mod far;
mod member;
mod pool_file;
mod run;
mod segment;
mod service;
mod tier;

pub use chunks::{ChunkStore, Usage};
pub use error::ChunkError;
pub use far::Behind;
pub use run::{Benefactor, BenefactorError, BenefactorOptions};
pub(crate) use segment::check_frame;
pub use segment::{FrameFault, open_frame};
pub use service::BenefactorService;
pub use tier::{Tier, TierError, TierOptions, TierUrl, TierUrlError};

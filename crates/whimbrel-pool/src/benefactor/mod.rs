//! A benefactor: spare disk given to the pool. It keeps chunks, serves them, and asks the manager which may go.

mod chunks;
mod pool_file;
mod run;
mod segment;
mod service;

pub use chunks::{ChunkError, ChunkStore, Usage};
pub use run::{Benefactor, BenefactorError, BenefactorOptions};
pub(crate) use segment::check_frame;
pub use segment::{FrameFault, open_frame};
pub use service::BenefactorService;

//! Losses: what a mend of this program prevents, for a test to bring back.
//!
//! The simulation must find each of them, or it would not find the next one either. In every build without
//! the feature `losses`, which no release has, [`is_back`] is the constant `false` and the compiler removes
//! its sites. Each loss has one site, which is the smallest change that brings it back.

macro_rules! losses {
    ($($(#[doc = $text:literal])* $name:ident,)*) => {
        /// Something that would be lost without a mend.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Loss {
            $($(#[doc = $text])* $name,)*
        }

        impl Loss {
            /// Every loss with its name and description.
            pub const ALL: &[(Loss, &'static str, &'static str)] =
                &[$((Loss::$name, stringify!($name), concat!($($text),*)),)*];
        }
    };
}

losses! {
    /// Any failed write latches the store, also one on a full disk.
    FullDiskLatches,
    /// A pull names its capsule before the capsule is complete.
    NameBeforePages,
    /// Garbage collection does not look again at capsules that were partial when it began.
    PartialMarkedOnce,
    /// An index is published over packs of a killed writer that were not synced.
    OrphanNotSynced,
    /// A store builds on names that a killed process left without a sync.
    NamesNotSynced,
    /// The folder of a new store is not durable in the one above.
    ParentNotSynced,
    /// A pack is indexed without a sync of its bytes.
    PackNotSynced,
    /// A pack is indexed without a sync of its name.
    PackNameNotSynced,
    /// A small file replaces the one before without a sync of its bytes.
    SmallFileNotSynced,
    /// A ref is acknowledged without a sync of its name.
    RefNameNotSynced,
    /// Garbage collection ignores what living machines and writers pin.
    PinsIgnored,
    /// Garbage collection does not mark again what was named while it moved frames.
    MarkedOnce,
    /// Garbage collection removes packs that a living writer may have relied on.
    WritersIgnored,
    /// Verification reports frames as damaged whose bases a killed collection removed.
    DeadDeltaDamaged,
    /// Verification does not compare digests, so changed bytes pass.
    DigestNotCompared,
    /// A source whose record of the handover failed goes on without taking it back.
    RecordNotReverted,
    /// A source that heard nothing after its commit runs the machine again.
    CommitTakenBack,
    /// A target runs the machine as soon as it is loaded.
    TargetRunsEarly,
    /// A target that lost its connection discards a machine that it has confirmed.
    TargetGivesUp,
    /// A daemon acts on records that the one before it wrote and did not sync.
    RecordNotDurable,
    /// A target that restarts does not wait with a machine that is gone from memory.
    GoneMachineForgotten,
    /// A primary deletes its machine when the witness says that it is taken.
    RetiredUnheard,
    /// A standby promises not to take over yet, and does not wait.
    PromiseBroken,
    /// A restarted witness believes that no lease runs.
    LeasesForgotten,
    /// A standby ends the protection when it cannot load the machine.
    StandbyGivesUp,
    /// A primary that restarts goes on before it knows who has the machine.
    RestartNotFenced,
    /// A checkpoint that a clock put back makes old is removed as soon as it is taken.
    NewCopyLooksOld,
    /// The next copy takes the tag of the oldest one at the other host, though the rule retains that.
    RetainedCopyReplaced,
    /// The folder of the first schedule is not durable in the one above.
    ScheduleFolderNotSynced,
}

#[cfg(feature = "losses")]
mod state {
    use super::Loss;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Number of the loss that is back, from 1; 0 for none.
    static BACK: AtomicUsize = AtomicUsize::new(0);

    /// Whether this loss was brought back.
    #[inline]
    pub fn is_back(loss: Loss) -> bool {
        BACK.load(Ordering::Relaxed) == loss as usize + 1
    }

    /// Brings a loss back in this process, instead of any other.
    pub fn bring_back(loss: Loss) {
        BACK.store(loss as usize + 1, Ordering::Relaxed);
    }
}

#[cfg(feature = "losses")]
pub use state::{bring_back, is_back};

/// Whether this loss was brought back: never in this build.
#[cfg(not(feature = "losses"))]
#[inline(always)]
pub const fn is_back(_: Loss) -> bool {
    false
}

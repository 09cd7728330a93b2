//! Network of machines beyond one port: tunnels and late frames.

pub(crate) mod late_frames;
pub(crate) mod tunnel;

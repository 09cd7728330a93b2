//! Network of machines beyond one port: managed networks, those that hosts share, tunnels and late frames.

pub(crate) mod late_frames;
pub(crate) mod managed;
pub(crate) mod offloads;
pub(crate) mod shared;
pub(crate) mod tunnel;

//! Network of machines beyond one port: managed networks, tunnels and late frames.

pub(crate) mod late_frames;
pub(crate) mod managed;
pub(crate) mod offloads;
pub(crate) mod tunnel;

//! System calls without a safe wrapper; all `unsafe` of the guest agent is in these modules.

pub(crate) mod interfaces;
pub(crate) mod packet;
pub(crate) mod ptrace;

//! Capsules between hosts, pools and buckets: pull, push, handoff and upload.

pub(crate) mod bucket;
pub(crate) mod capsule_access;
pub(crate) mod handoff;
pub(crate) mod hash_cache;
mod image_alignment;
pub(crate) mod pool;
pub(crate) mod pull;
mod push;
mod reader_pins;
pub(crate) mod remote_objects;
pub(crate) mod store_service;
pub(crate) mod upload;

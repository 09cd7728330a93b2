//! Verbs of the command line, one file each, or several short ones in `short_verbs`: the arguments with their
//! help, and the call of the daemon.

pub(crate) mod apply;
pub(crate) mod bisect;
pub(crate) mod cache;
pub(crate) mod checkpoint;
pub(crate) mod clone;
pub(crate) mod completions;
pub(crate) mod console;
pub(crate) mod cp;
pub(crate) mod cpu;
pub(crate) mod decompress_image;
pub(crate) mod derive;
pub(crate) mod dial_stdio;
pub(crate) mod dirty_rate;
pub(crate) mod display;
pub(crate) mod doctor;
pub(crate) mod edit;
pub(crate) mod encryption;
pub(crate) mod evacuate;
pub(crate) mod events;
pub(crate) mod exec;
pub(crate) mod export;
pub(crate) mod host;
pub(crate) mod image;
pub(crate) mod key;
pub(crate) mod launch;
pub(crate) mod log;
pub(crate) mod logs;
pub(crate) mod ls;
pub(crate) mod mcp;
pub(crate) mod migrate;
pub(crate) mod migrations;
pub(crate) mod mount;
pub(crate) mod network;
pub(crate) mod open;
pub(crate) mod outdated;
pub(crate) mod pool;
pub(crate) mod promote;
pub(crate) mod protect;
pub(crate) mod push;
pub(crate) mod report;
pub(crate) mod resolve;
pub(crate) mod resume;
pub(crate) mod run;
pub(crate) mod schedule;
pub(crate) mod serve;
pub(crate) mod session;
pub(crate) mod set;
pub(crate) mod share;
pub(crate) mod short_verbs;
pub(crate) mod ssh;
pub(crate) mod stop;
pub(crate) mod token;
pub(crate) mod top;
pub(crate) mod trust;
pub(crate) mod unpack_layer;
pub(crate) mod untag;
pub(crate) mod upgrade;
pub(crate) mod vm;
pub(crate) mod web;

pub(crate) use short_verbs::{
    balloon, delete, diff, failover, gc, import, inspect, pause, ps, pull, rename, repair, rewind, show,
    start, suspend, tag, unpause, unprotect, verify,
};

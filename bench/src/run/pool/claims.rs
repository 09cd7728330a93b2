//! A benefactor that says it holds whatever a client claims: for experiments in which metadata is measured,
//! so there is nothing behind it.

use anyhow::Result;
use bytes::Bytes;
use whimbrel_pool::{
    client::Pool,
    protocol::{BenefactorStatus, FlushChunks, Heartbeat},
};
use whimbrel_wire::{Answer, BoxFuture, Call, Peer, Refusal, Reply, Request, Service};

/// Confirms every chunk, for the connection on which [`claim`] registers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Confirms;

impl Service for Confirms {
    fn handle<'a>(&'a self, _peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            match request.kind {
                // No bit is set: nothing is missing.
                FlushChunks::KIND => Reply::of::<FlushChunks>(&(), Bytes::new()),
                other => Err(Refusal::unknown_kind(other)),
            }
        })
    }
}

/// Registers the client as a benefactor of endless size; its number.
pub(super) async fn claim(pool: &Pool) -> Result<u16> {
    let (name, address) = ("claims".to_owned(), "127.0.0.1:1".to_owned());
    let (capacity, free) = (1 << 50, 1 << 50);
    let status = BenefactorStatus {
        name,
        address,
        pool: 0,
        capacity,
        used: 0,
        free,
        chunks: 0,
        draining: false,
        owed: 0,
    };
    Ok(pool.call_manager::<Heartbeat>(&status, Bytes::new()).await?.0.id)
}

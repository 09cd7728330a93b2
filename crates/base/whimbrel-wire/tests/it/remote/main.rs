//! The remote program behind ssh in the tests: echoes every request until the peer is gone.

use std::error::Error;
use whimbrel_wire::{
    Answer, BoxFuture, Endpoint, Peer, PeerIdentity, Reply, Request, Rights, Service, connect_io, stdio,
};

struct Echo;

impl Service for Echo {
    fn handle<'a>(&'a self, _peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        Box::pin(async move { Ok(Reply { header: request.header, payload: request.payload }) })
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let endpoint = Endpoint::new("remote".parse()?, Echo);
    let (reader, writer) = stdio()?;
    connect_io(reader, writer, PeerIdentity::Stdio, Rights::all(), &endpoint).await?.closed().await;
    Ok(())
}

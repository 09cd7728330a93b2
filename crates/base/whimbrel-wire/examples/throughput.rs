//! Measures the throughput of one connection over loopback and the time of an empty call. Use `--release`.

use bytes::Bytes;
use std::{collections::VecDeque, error::Error, sync::Arc, time::Instant};
use tokio::net::TcpListener;
use whimbrel_wire::{
    Answer, BoxFuture, Endpoint, Identity, Peer, Reply, Request, Rights, Service, Trust, TrustedPeer,
    connect_tls, serve_tls,
};

const SINK: u16 = 0x0700;
const BULK_CALLS: usize = 8192;
const EMPTY_CALLS: u32 = 50_000;

struct Sink;

impl Service for Sink {
    fn handle<'a>(&'a self, _peer: &'a Peer, _request: Request) -> BoxFuture<'a, Answer> {
        Box::pin(async { Ok(Reply::default()) })
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let (server, client) = (Identity::ephemeral()?, Identity::ephemeral()?);
    let trust = Arc::new(Trust::load(dir.path())?);
    let key = client.public_key();
    trust.add(TrustedPeer {
        name: "client".parse()?,
        key: Some(key),
        address: None,
        rights: Rights::all(),
        read: None,
        write: None,
    })?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let expected = server.public_key();
    let endpoint = Endpoint::new("server".parse()?, Sink);
    tokio::spawn(async move { serve_tls(listener, &server, trust, endpoint).await });
    let connection = connect_tls(&address, expected, &client, &Endpoint::new("client".parse()?, ())).await?;

    let payload = Bytes::from(vec![0x5a; 1 << 20]);
    for order in ["any order", "one stream"] {
        let (began, mut pending) = (Instant::now(), VecDeque::new());
        for _ in 0..BULK_CALLS {
            let request = Request::new(SINK, Bytes::new(), payload.clone());
            let request = if order == "any order" { request } else { request.ordered(1) };
            pending.push_back(connection.start(request).await?);
            if pending.len() > 64 {
                pending.pop_front().ok_or("empty")?.await?;
            }
        }
        for reply in pending {
            reply.await?;
        }
        let rate = BULK_CALLS as f64 * 1048576.0 / 1e9 / began.elapsed().as_secs_f64();
        println!("1 MiB calls, {order}: {rate:.2} GB/s");
    }

    let mut times = Vec::new();
    for _ in 0..EMPTY_CALLS {
        let began = Instant::now();
        connection.call(Request::new(SINK, Bytes::new(), Bytes::new())).await?;
        times.push(began.elapsed());
    }
    times.sort();
    let at = |part: f64| times[(times.len() as f64 * part) as usize];
    println!("empty call: median {:?}, 99 % {:?}", at(0.5), at(0.99));
    Ok(())
}

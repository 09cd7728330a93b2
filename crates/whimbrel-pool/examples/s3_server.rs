//! An S3 server on loopback that keeps objects as files, for tests: `s3_server ROOT ADDRESS:PORT`. Prints its address.
//!
//! Buckets are the folders in ROOT. The key is `test`, the secret `test-secret`; who signs with others is refused.

use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
};
use s3s::{auth::SimpleAuth, service::S3ServiceBuilder};
use s3s_fs::FileSystem;
use std::error::Error;
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(root), Some(address)) = (arguments.next(), arguments.next()) else {
        return Err("usage: s3_server ROOT ADDRESS:PORT".into());
    };
    let files = FileSystem::new(root).map_err(|error| format!("{error:?}"))?;
    let mut service = S3ServiceBuilder::new(files);
    service.set_auth(SimpleAuth::from_single("test", "test-secret"));
    let service = service.build();
    let listener = TcpListener::bind(address).await?;
    println!("{}", listener.local_addr()?);
    let server = Builder::new(TokioExecutor::new());
    loop {
        let (socket, _) = listener.accept().await?;
        let connection = server.serve_connection(TokioIo::new(socket), service.clone()).into_owned();
        tokio::spawn(async move { drop(connection.await) });
    }
}

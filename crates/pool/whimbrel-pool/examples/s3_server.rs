//! S3 server for tests: stores objects as files and listens on loopback. Usage: `s3_server ROOT ADDRESS:PORT
//! [LOG]`. Prints its address.
//!
//! Buckets are the folders in ROOT. The key is `test`, the secret `test-secret`; requests signed with others
//! are refused. Every request is a line of LOG.

use hyper::{
    Request,
    body::Incoming,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
};
use s3s::{
    auth::SimpleAuth,
    service::{S3Service, S3ServiceBuilder},
};
use s3s_fs::FileSystem;
use std::{error::Error, fs::File, io::Write, sync::Arc};
use tokio::net::{TcpListener, TcpStream};

/// Answers one connection until it ends.
async fn attend(socket: TcpStream, service: S3Service, log: Option<Arc<File>>) {
    let answer = service_fn(move |request: Request<Incoming>| {
        if let Some(mut log) = log.as_deref() {
            let line = format!("{} {}\n", request.method(), request.uri().path());
            // A request is answered even if its line cannot be written.
            let _ = log.write_all(line.as_bytes());
        }
        Service::call(&service, request)
    });
    drop(Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(socket), answer).await);
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(root), Some(address)) = (arguments.next(), arguments.next()) else {
        return Err("usage: s3_server ROOT ADDRESS:PORT [LOG]".into());
    };
    let log = arguments.next().map(|path| File::options().create(true).append(true).open(path));
    let log = log.transpose()?.map(Arc::new);
    let files = FileSystem::new(root).map_err(|error| format!("{error:?}"))?;
    let mut service = S3ServiceBuilder::new(files);
    service.set_auth(SimpleAuth::from_single("test", "test-secret"));
    let service = service.build();
    let listener = TcpListener::bind(address).await?;
    println!("{}", listener.local_addr()?);
    loop {
        let (socket, _) = listener.accept().await?;
        // Head and body of an answer are two writes; without this, the second would wait for the
        // acknowledgement of the first. An error shows when the connection is served.
        let _ = socket.set_nodelay(true);
        tokio::spawn(attend(socket, service.clone(), log.clone()));
    }
}

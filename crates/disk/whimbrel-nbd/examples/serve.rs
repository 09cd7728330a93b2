//! Serves a raw image file: `serve SOCKET FILE`, to try the server and to compare it with others.

use std::{env, path::Path, sync::Arc, thread};
use whimbrel_block::FileDevice;

fn main() -> std::io::Result<()> {
    let args: Vec<_> = env::args_os().collect();
    let [_, socket, file] = &args[..] else {
        eprintln!("usage: serve SOCKET FILE");
        std::process::exit(2);
    };
    let device = Arc::new(FileDevice::open(Path::new(file))?);
    let listener = whimbrel_nbd::bind(Path::new(socket))?;
    let _server = whimbrel_nbd::serve(device, listener, whimbrel_nbd::Options::default())?;
    loop {
        thread::park();
    }
}

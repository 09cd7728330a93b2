//! The server as its clients see it: well-behaved tools, hostile strangers, restarts.

mod export;
mod hostile;
mod restart;
mod tools;

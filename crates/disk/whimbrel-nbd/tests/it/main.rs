//! Tests of the server by its clients: standard tools, hostile clients, restarts.

mod export;
mod hostile;
mod restart;
mod suspend;
mod tools;

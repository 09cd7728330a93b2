//! Traffic for probes outside the guest: a stream, echoes, a game server and HTTP.
//!
//! A numbered stream (TCP 7001), echoes (TCP 7002, UDP 7003), a server that sends updates to players as games
//! do (UDP 7004) and `/bytes/N` over HTTP (TCP 7080). A port that is unavailable is reported and left out.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

/// Bytes of a line of the stream, with its line feed.
const STREAM_LINE: usize = 64;

/// Time for which a player gets updates after its last message.
const UPDATE_DURATION: Duration = Duration::from_secs(600);
const UPDATES_MAX: u32 = 1000;
/// Bytes of an update, as in a game of a few players.
const UPDATE: usize = 160;

pub(crate) fn start() {
    accept(7001, stream);
    accept(7002, echo);
    accept(7080, http);
    thread::spawn(|| {
        if let Err(error) = echo_datagrams() {
            eprintln!("test agent: no datagrams on port 7003: {error}");
        }
    });
    thread::spawn(|| {
        if let Err(error) = serve_players() {
            eprintln!("test agent: no game on port 7004: {error}");
        }
    });
}

fn accept(port: u16, serve: fn(TcpStream) -> io::Result<()>) {
    let listener = match TcpListener::bind(("0.0.0.0", port)) {
        Ok(listener) => listener,
        Err(error) => return eprintln!("test agent: cannot listen on port {port}: {error}"),
    };
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            let _ = connection.set_nodelay(true);
            thread::spawn(move || serve(connection));
        }
    });
}

/// Sends one line each millisecond: a sequence number from 0, padded with dots.
fn stream(mut connection: TcpStream) -> io::Result<()> {
    let begin = Instant::now();
    for sequence in 0u64.. {
        let mut line = format!("{sequence:.<width$}", width = STREAM_LINE - 1);
        line.push('\n');
        connection.write_all(line.as_bytes())?;
        thread::sleep(Duration::from_millis(sequence).saturating_sub(begin.elapsed()));
    }
    Ok(())
}

fn echo(connection: TcpStream) -> io::Result<()> {
    io::copy(&mut &connection, &mut &connection).map(drop)
}

fn echo_datagrams() -> io::Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", 7003))?;
    let mut datagram = [0; 2048];
    loop {
        let (len, from) = socket.recv_from(&mut datagram)?;
        // While the network is down an answer cannot be sent; the client counts it as lost.
        let _ = socket.send_to(&datagram[..len], from);
    }
}

/// Serves players: a client that sends a number gets that many numbered updates a second.
fn serve_players() -> io::Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", 7004))?;
    let mut datagram = [0; 64];
    loop {
        let (len, player) = socket.recv_from(&mut datagram)?;
        let rate = std::str::from_utf8(&datagram[..len]).ok().and_then(|text| text.trim().parse().ok());
        let Some(rate) = rate.filter(|rate| (1..=UPDATES_MAX).contains(rate)) else { continue };
        let socket = socket.try_clone()?;
        thread::spawn(move || update(&socket, player, rate));
    }
}

fn update(socket: &UdpSocket, player: SocketAddr, rate: u32) {
    let (begin, mut update) = (Instant::now(), [0; UPDATE]);
    for number in 0u64.. {
        let due = Duration::from_secs_f64(number as f64 / f64::from(rate));
        if due > UPDATE_DURATION {
            return;
        }
        thread::sleep(due.saturating_sub(begin.elapsed()));
        update[..8].copy_from_slice(&number.to_le_bytes());
        // An update that cannot be sent is lost, as on any network.
        let _ = socket.send_to(&update, player);
    }
}

/// Answers one `GET /bytes/N`, then closes.
fn http(connection: TcpStream) -> io::Result<()> {
    let mut head = BufReader::new((&connection).take(8192));
    let mut first = String::new();
    head.read_line(&mut first)?;
    let mut line = String::new();
    while head.read_line(&mut line)? > 2 {
        line.clear();
    }
    let path = first.split(' ').nth(1).unwrap_or_default();
    let Some(mut left) = path.strip_prefix("/bytes/").and_then(|count| count.parse::<usize>().ok()) else {
        return (&connection)
            .write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    };
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {left}\r\nConnection: close\r\n\r\n");
    (&connection).write_all(head.as_bytes())?;
    let piece = [b'w'; 1 << 16];
    while left > 0 {
        let len = left.min(piece.len());
        (&connection).write_all(&piece[..len])?;
        left -= len;
    }
    Ok(())
}

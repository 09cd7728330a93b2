//! Traffic to be watched from outside: a numbered stream (TCP 7001), echoes (TCP 7002, UDP 7003) and a tiny
//! HTTP server of `/bytes/N` (TCP 7080). A port that cannot be had is reported and left out.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

/// Bytes of a line of the stream, its end included.
const STREAM_LINE: usize = 64;

/// Starts every service.
pub(crate) fn start() {
    accept(7001, stream);
    accept(7002, echo);
    accept(7080, http);
    thread::spawn(|| {
        if let Err(error) = echo_datagrams() {
            eprintln!("witness: no datagrams on port 7003: {error}");
        }
    });
}

fn accept(port: u16, serve: fn(TcpStream) -> io::Result<()>) {
    let listener = match TcpListener::bind(("0.0.0.0", port)) {
        Ok(listener) => listener,
        Err(error) => return eprintln!("witness: no port {port}: {error}"),
    };
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            let _ = connection.set_nodelay(true);
            thread::spawn(move || serve(connection));
        }
    });
}

/// One line each millisecond: a sequence number from 0, padded with dots.
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
        // While the network is away an answer cannot be sent; the asker counts it as lost.
        let _ = socket.send_to(&datagram[..len], from);
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

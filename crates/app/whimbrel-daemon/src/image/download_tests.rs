//! Downloads from servers that break off, redirect, send too much, or something else.

use super::*;
use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::mpsc::{Receiver, channel},
};

/// A server that answers each connection with the next of these answers, and says what was asked for.
fn server(answers: Vec<Vec<u8>>) -> (Location, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let location = format!("http://{}/disk.img", listener.local_addr().unwrap()).parse().unwrap();
    let (tell, told) = channel();
    std::thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = tell.send(asked(&stream));
            let _ = stream.write_all(&answer);
        }
    });
    (location, told)
}

fn asked(stream: &TcpStream) -> String {
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join("\n").to_lowercase()
}

fn answer(status: &str, headers: &str, length: usize, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n{headers}\r\n");
    [head.as_bytes(), body].concat()
}

fn checksum(content: &[u8]) -> Checksum {
    let mut context = Checksum::parse(&"0".repeat(128)).unwrap().context();
    context.update(content);
    Checksum::of(context)
}

/// Fetches what is at `location` and expects `content`. The answer has what is in the file.
async fn fetch(location: &Location, content: &[u8], size: Option<u64>) -> Result<Vec<u8>, FetchError> {
    let (file, checksum) = (tempfile::tempfile().unwrap(), checksum(content));
    let wanted = Download { location, checksum: &checksum, size, file: &file, said: Said::default() };
    wanted.run(&mut |_, _| ControlFlow::Continue(())).await?;
    let mut found = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut found, 0).unwrap();
    Ok(found)
}

const CONTENT: &[u8] = b"0123456789 a disk";

#[tokio::test]
async fn a_broken_download_is_continued_where_it_broke() {
    let half = answer("200 OK", "", CONTENT.len(), &CONTENT[..7]);
    let range = format!("content-range: bytes 7-{}/{}\r\n", CONTENT.len() - 1, CONTENT.len());
    let rest = answer("206 Partial Content", &range, CONTENT.len() - 7, &CONTENT[7..]);
    let (location, told) = server(vec![half, answer("503 Busy", "", 0, b""), rest]);
    assert_eq!(fetch(&location, CONTENT, None).await.unwrap(), CONTENT);
    let told: Vec<_> = told.iter().collect();
    assert!(!told[0].contains("range:"), "{told:?}");
    assert!(told[1..].iter().all(|asked| asked.contains("range: bytes=7-")), "{told:?}");
}

#[tokio::test]
async fn a_server_without_ranges_begins_anew_and_another_part_is_refused() {
    let half = || answer("200 OK", "", CONTENT.len(), &CONTENT[..7]);
    let (location, _told) = server(vec![half(), answer("200 OK", "", CONTENT.len(), CONTENT)]);
    assert_eq!(fetch(&location, CONTENT, None).await.unwrap(), CONTENT);

    let range = "content-range: bytes 3-16/17\r\n";
    let (location, _told) = server(vec![half(), answer("206 Partial Content", range, 14, &CONTENT[3..])]);
    let refused = fetch(&location, CONTENT, None).await.unwrap_err();
    assert!(refused.to_string().contains("another part"), "{refused}");
}

#[tokio::test]
async fn what_is_longer_than_listed_or_has_another_checksum_is_refused() {
    let (location, _told) = server(vec![answer("200 OK", "", CONTENT.len(), CONTENT)]);
    let refused = fetch(&location, b"another disk", None).await.unwrap_err();
    assert!(refused.is_distrust() && refused.to_string().contains("the source lists sha512:"), "{refused}");

    let (location, _told) = server(vec![answer("200 OK", "", CONTENT.len(), CONTENT)]);
    let refused = fetch(&location, CONTENT, Some(10)).await.unwrap_err();
    assert!(matches!(refused, FetchError::TooLong { limit: 10 }), "{refused}");

    let endless = [b"HTTP/1.1 200 OK\r\n\r\n", CONTENT, CONTENT].concat();
    let (location, _told) = server(vec![endless]);
    let refused = fetch(&location, CONTENT, Some(CONTENT.len() as u64)).await.unwrap_err();
    assert!(matches!(refused, FetchError::TooLong { .. }), "{refused}");
    let (location, _told) = server(vec![answer("200 OK", "", 2000, &[b'x'; 2000])]);
    assert!(matches!(read(&location, 1999).await, Err(FetchError::TooLong { limit: 1999 })));
}

#[tokio::test]
async fn redirections_are_followed_and_end() {
    let (goal, _told) = server(vec![answer("200 OK", "", CONTENT.len(), CONTENT)]);
    let to = |place: &str| answer("302 Found", &format!("location: {place}\r\n"), 0, b"");
    let (location, _told) = server(vec![to(&goal.to_string())]);
    assert_eq!(fetch(&location, CONTENT, None).await.unwrap(), CONTENT);
    let (location, _told) = server(vec![to("/again"); REDIRECTIONS + 1]);
    assert!(matches!(fetch(&location, CONTENT, None).await, Err(FetchError::Redirections)));
    let (location, _told) = server(vec![answer("404 Not Found", "", 0, b"")]);
    assert!(fetch(&location, CONTENT, None).await.unwrap_err().is_absent());
}

#[tokio::test]
async fn a_cancel_ends_a_download_whose_server_is_silent() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let location: Location = format!("http://{}/x", listener.local_addr().unwrap()).parse().unwrap();
    let silent = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        asked(&stream);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc");
        stream.read_to_end(&mut Vec::new())
    });
    let (file, checksum) = (tempfile::tempfile().unwrap(), checksum(CONTENT));
    let wanted =
        Download { location: &location, checksum: &checksum, size: None, file: &file, said: Said::default() };
    let mut calls = 0;
    let mut progress = |done, total| {
        calls += u32::from(done == 3 && total == Some(10));
        if calls > 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    assert!(matches!(wanted.run(&mut progress).await, Err(FetchError::Cancelled)));
    // The connection is closed by a task of this thread.
    tokio::task::spawn_blocking(move || silent.join().unwrap().unwrap()).await.unwrap();
}

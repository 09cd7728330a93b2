//! Guest requests of users: `whimbrel-guest migrate HOST` sends its request to the running agent over a Unix
//! socket, and waits.
//!
//! Lines of text: one request in, and out `begun`, then `done …`, `refused …` or `failed …`. Only root can
//! open the socket. A request to migrate is answered on the target, when the new host sends its hello.

use std::{
    fs,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{
            fs::PermissionsExt as _,
            net::{UnixListener, UnixStream},
        },
    },
    process::ExitCode,
    time::Duration,
};
use whimbrel_guest_protocol::{GuestRequest, RequestOutcome};

const SOCKET: &str = "/run/whimbrel-guest.sock";
/// Longest request line.
const LINE_MAX: u64 = 300;
const REQUESTS_MAX: usize = 8;
/// Time in which a client must send its request after connecting.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// Status of a request, as sent to the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RequestStatus {
    Begun,
    Done(String),
    Refused(String),
    Failed(String),
}

impl From<RequestOutcome> for RequestStatus {
    fn from(outcome: RequestOutcome) -> Self {
        match outcome {
            RequestOutcome::Started => Self::Begun,
            RequestOutcome::Done(what) => Self::Done(what),
            RequestOutcome::Refused(why) => Self::Refused(why),
            RequestOutcome::Failed(why) => Self::Failed(why),
        }
    }
}

impl RequestStatus {
    fn line(&self) -> String {
        match self {
            Self::Begun => "begun\n".to_owned(),
            Self::Done(what) => format!("done {what}\n"),
            Self::Refused(why) => format!("refused {why}\n"),
            Self::Failed(why) => format!("failed {why}\n"),
        }
    }
}

/// Client that waits for the result of its request.
struct PendingRequest {
    id: u32,
    stream: UnixStream,
    ask: GuestRequest,
}

pub(crate) struct RequestListener {
    listener: UnixListener,
    waiting: Vec<PendingRequest>,
    next: u32,
    host: Option<String>,
}

impl RequestListener {
    pub(crate) fn open() -> io::Result<Self> {
        // In a guest that has just booted `/run` may not exist yet.
        fs::create_dir_all("/run")?;
        match fs::remove_file(SOCKET) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(SOCKET)?;
        fs::set_permissions(SOCKET, fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, waiting: Vec::new(), next: 1, host: None })
    }

    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.listener.as_fd())
    }

    pub(crate) fn next_request(&mut self) -> Option<(u32, GuestRequest)> {
        loop {
            let (mut stream, _) = self.listener.accept().ok()?;
            match read_request(&stream) {
                Ok(ask) if self.waiting.len() < REQUESTS_MAX => {
                    let id = self.next;
                    self.next = self.next.wrapping_add(1);
                    self.waiting.push(PendingRequest { id, stream, ask: ask.clone() });
                    return Some((id, ask));
                }
                Ok(_) => answer(&mut stream, &RequestStatus::Refused("too many requests at once".into())),
                Err(error) => answer(&mut stream, &RequestStatus::Failed(error.to_string())),
            }
        }
    }

    pub(crate) fn answer(&mut self, id: u32, wish: &RequestStatus) {
        let ended = *wish != RequestStatus::Begun;
        self.waiting.iter_mut().filter(|waiting| waiting.id == id).for_each(|w| answer(&mut w.stream, wish));
        self.waiting.retain(|waiting| !(ended && waiting.id == id));
    }

    /// Handles the hello of a host: it completes a migration to that host; all other pending requests were
    /// lost.
    pub(crate) fn handle_hello(&mut self, host: &str) {
        for mut waiting in self.waiting.drain(..) {
            let wish = match &waiting.ask {
                GuestRequest::Migrate { host: to } if to == host => RequestStatus::Done(format!("on {host}")),
                GuestRequest::Migrate { .. } => {
                    RequestStatus::Failed(format!("{host} sent a hello: the migration was interrupted"))
                }
                GuestRequest::Checkpoint { .. } => RequestStatus::Failed(format!(
                    "{host} sent a hello: the checkpoint was interrupted, or this is a resumed copy"
                )),
            };
            answer(&mut waiting.stream, &wish);
        }
        self.host = Some(host.to_owned());
    }

    /// Fails new requests, because no host is connected. Pending requests continue to wait.
    pub(crate) fn refuse_all(&mut self, why: &str) {
        while let Ok((mut stream, _)) = self.listener.accept() {
            answer(&mut stream, &RequestStatus::Failed(why.to_owned()));
        }
    }
}

/// Writes to a client; one that has disconnected is ignored.
fn answer(stream: &mut UnixStream, wish: &RequestStatus) {
    let _ = stream.write_all(wish.line().as_bytes());
}

fn read_request(stream: &UnixStream) -> io::Result<GuestRequest> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(READ_TIMEOUT))?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_MAX)).read_line(&mut line)?;
    parse(&line).ok_or_else(|| io::Error::other("invalid request"))
}

fn parse(line: &str) -> Option<GuestRequest> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words.as_slice() {
        ["migrate", host] => Some(GuestRequest::Migrate { host: (*host).to_owned() }),
        ["checkpoint"] => Some(GuestRequest::Checkpoint { tag: String::new() }),
        ["checkpoint", tag] => Some(GuestRequest::Checkpoint { tag: (*tag).to_owned() }),
        _ => None,
    }
}

/// Sends a request to the running agent and waits for its result.
pub(crate) fn send(wish: &str) -> ExitCode {
    let mut stream = match UnixStream::connect(SOCKET) {
        Ok(stream) => stream,
        Err(error) => {
            eprintln!("whimbrel-guest: the agent is not running ({SOCKET}: {error}); start whimbrel-guest");
            return ExitCode::FAILURE;
        }
    };
    if let Err(error) = stream.write_all(format!("{wish}\n").as_bytes()) {
        eprintln!("whimbrel-guest: {error}");
        return ExitCode::FAILURE;
    }
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        match line.split_once(' ') {
            Some(("done", what)) => {
                println!("{what}");
                return ExitCode::SUCCESS;
            }
            Some(("refused", why)) => {
                eprintln!("whimbrel-guest: refused: {why}");
                return ExitCode::from(3);
            }
            Some(("failed", why)) => {
                eprintln!("whimbrel-guest: {why}");
                return ExitCode::FAILURE;
            }
            _ => eprintln!("{line}"),
        }
    }
    eprintln!("whimbrel-guest: the guest agent has ended");
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wishes_are_read_and_nothing_else() {
        assert_eq!(parse("migrate beta\n"), Some(GuestRequest::Migrate { host: "beta".into() }));
        assert_eq!(parse("checkpoint"), Some(GuestRequest::Checkpoint { tag: String::new() }));
        assert_eq!(parse("checkpoint before\n"), Some(GuestRequest::Checkpoint { tag: "before".into() }));
        for wrong in ["", "migrate", "migrate a b", "reboot"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}

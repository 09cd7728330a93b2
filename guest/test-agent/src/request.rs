//! The line protocol: `whimbrel? TOKEN [VERB …]` asks, one line `whimbrel! TOKEN …` answers.
//!
//! Pure. The token, chosen by the asker, finds the answer among what else a console prints.

use crate::load::Load;

/// Longest line that is looked at.
pub(crate) const LINE_MAX: usize = 256;

/// What is asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// Nothing but an answer.
    Ping,
    /// Identity without reading everything.
    State,
    /// Identity with all checksums.
    Check,
    /// Write so many blocks to the disk.
    Write(u64),
    /// Dirty memory.
    Dirty(Load),
    /// Stop dirtying memory.
    Calm,
    /// Read the whole disk through the page cache.
    Cache,
    /// How much memory there is, free and in caches.
    Memory,
    /// Start over.
    Reboot,
    /// End.
    Poweroff,
}

/// A request: the token and what is asked for; a request that makes no sense has no verb.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request<'a> {
    /// Comes back in the answer.
    pub(crate) token: &'a str,
    /// What is asked for.
    pub(crate) verb: Option<Verb>,
}

/// Reads a line; none when it is not a request at all (a console carries other lines too).
pub(crate) fn parse(line: &str) -> Option<Request<'_>> {
    let mut words = line.split_whitespace();
    if words.next() != Some("whimbrel?") {
        return None;
    }
    let token = words.next()?;
    let verb = match words.next().unwrap_or("state") {
        "ping" => Some(Verb::Ping),
        "state" => Some(Verb::State),
        "check" => Some(Verb::Check),
        "write" => words.next().and_then(|count| count.parse().ok()).map(Verb::Write),
        "dirty" => Load::from_words(words).map(Verb::Dirty),
        "calm" => Some(Verb::Calm),
        "cache" => Some(Verb::Cache),
        "memory" => Some(Verb::Memory),
        "reboot" => Some(Verb::Reboot),
        "poweroff" => Some(Verb::Poweroff),
        _ => None,
    };
    Some(Request { token, verb })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_console_are_not_requests() {
        assert_eq!(parse("random: crng init done"), None);
        assert_eq!(parse("whimbrel?"), None);
        assert_eq!(parse("whimbrel? t1"), Some(Request { token: "t1", verb: Some(Verb::State) }));
        assert_eq!(parse(" whimbrel? t write 9\r"), Some(Request { token: "t", verb: Some(Verb::Write(9)) }));
        assert_eq!(parse("whimbrel? t write x"), Some(Request { token: "t", verb: None }));
        assert_eq!(parse("whimbrel? t dirty 64 0 9999999"), Some(Request { token: "t", verb: None }));
    }
}

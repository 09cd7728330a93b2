//! Line protocol of the test agent: `whimbrel? TOKEN [VERB …]` is a request, one line `whimbrel! TOKEN …` the
//! answer.
//!
//! Pure. The client chooses the token, by which it finds the answer among the other output of a console.

use crate::load::Load;

/// Longest line that is parsed.
pub(crate) const LINE_MAX: usize = 256;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    /// Answer without any work.
    Ping,
    /// Report identity without reading everything.
    State,
    Check,
    Write(u64),
    /// Report the longest write of the background, which begins with the first such request.
    Stall,
    Dirty(Load),
    /// Stop dirtying memory.
    Calm,
    /// Read the complete disk through the page cache.
    Cache,
    /// Report total, free and cached memory.
    Memory,
    /// Report the wall clock.
    Clock,
    /// Report what the TPM has, after this value was put into it.
    Tpm(Option<u64>),
    Reboot,
    Poweroff,
}

/// Request: the token and the verb, none for an invalid request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request<'a> {
    pub(crate) token: &'a str,
    pub(crate) verb: Option<Verb>,
}

/// Parses a line; none if it is no request (a console has other lines too).
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
        "stall" => Some(Verb::Stall),
        "dirty" => Load::from_words(words).map(Verb::Dirty),
        "calm" => Some(Verb::Calm),
        "cache" => Some(Verb::Cache),
        "memory" => Some(Verb::Memory),
        "clock" => Some(Verb::Clock),
        "tpm" => Some(Verb::Tpm(words.next().and_then(|value| value.parse().ok()))),
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

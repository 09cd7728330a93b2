//! Bound of the log lines that strangers cause. Pure: the caller passes the time.

use std::time::{Duration, Instant};

/// Lines of one period that are written; further ones are counted.
const LINES: u32 = 20;
const PERIOD: Duration = Duration::from_secs(10);

/// Lines of the present period, and those that were left out before it.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    begun: Option<Instant>,
    written: u32,
    left_out: u64,
}

impl LogLimit {
    /// Whether a line may be written now; if so, the number of lines that were left out before it and not
    /// told of yet.
    pub(crate) fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.begun.is_none_or(|begun| now.saturating_duration_since(begun) >= PERIOD) {
            (self.begun, self.written) = (Some(now), 0);
        }
        if self.written == LINES {
            self.left_out += 1;
            return None;
        }
        self.written += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_writes_few_lines_and_is_told_of_once() {
        let (mut limit, begun) = (LogLimit::default(), Instant::now());
        let admitted = (0..1000).filter(|_| limit.admit(begun) == Some(0)).count();
        assert_eq!(admitted, LINES as usize);
        assert_eq!(limit.admit(begun + PERIOD), Some(980));
        assert_eq!(limit.admit(begun + PERIOD), Some(0));
    }
}

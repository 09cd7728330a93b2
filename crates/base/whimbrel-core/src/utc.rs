//! Dates and times of UTC, from milliseconds since 1970. There are no leap seconds and no daylight saving.

use std::fmt;

const DAY_MS: u64 = 86_400_000;

/// Moment of UTC, to the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Utc {
    /// Year, from 1970.
    pub year: u64,
    /// Month, from 1.
    pub month: u8,
    /// Day of the month, from 1.
    pub day: u8,
    /// Second of the day.
    pub second: u32,
}

impl Utc {
    /// Moment that is so many milliseconds after the beginning of 1970.
    pub fn from_ms(ms: u64) -> Self {
        let (days, second) = (ms / DAY_MS, (ms % DAY_MS / 1000) as u32);
        // Howard Hinnant, chrono-compatible low-level date algorithms: years begin in March, and an era has
        // 400 of them.
        let from_era = days + 719_468;
        let (era, day_of_era) = (from_era / 146_097, from_era % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * day_of_year + 2) / 153;
        let day = (day_of_year - (153 * shifted + 2) / 5 + 1) as u8;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 } as u8;
        let year = year_of_era + era * 400 + u64::from(month <= 2);
        Self { year, month, day, second }
    }
}

impl fmt::Display for Utc {
    /// As in RFC 3339, like `2026-11-25T20:50:00Z`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { year, month, day, second } = self;
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments_have_their_dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_799, "2000-02-29T23:59:59Z"),
            (1_709_164_800, "2024-02-29T00:00:00Z"),
            (1_795_639_262, "2026-11-25T20:41:02Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(Utc::from_ms(seconds * 1000).to_string(), text);
        }
    }

    #[test]
    fn every_day_follows_the_one_before() {
        let mut before = Utc::from_ms(0);
        for day in 1..60_000 {
            let now = Utc::from_ms(day * DAY_MS);
            let next_day = (now.year, now.month, now.day) == (before.year, before.month, before.day + 1);
            let next_month = (now.year, now.month, now.day) == (before.year, before.month + 1, 1);
            let next_year = (now.year, now.month, now.day, before.month) == (before.year + 1, 1, 1, 12);
            assert!((next_day || next_month || next_year) && before.day <= 31, "{before} {now}");
            before = now;
        }
    }
}

//! Random ids of 128 bits, written as 32 hexadecimal digits.

use std::fmt;

/// A text that is not 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an id has 32 hexadecimal digits")]
pub struct ParseIdError;

/// Writes bytes as hexadecimal digits.
pub fn write(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

/// Reads 32 hexadecimal digits.
pub fn parse(text: &str) -> Result<[u8; 16], ParseIdError> {
    let hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = u128::from_str_radix(text, 16).ok().filter(|_| hex);
    number.map(u128::to_be_bytes).ok_or(ParseIdError)
}

/// Defines a type of ids: `hex_id! { /// Docs. pub struct NameId; }`. Its `Debug` shows two bytes, since an
/// id may be a right to do something.
#[macro_export]
macro_rules! hex_id {
    ($(#[$meta:meta])* pub struct $name:ident;) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub struct $name(pub [u8; 16]);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $crate::hex_id::write(&self.0, f)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($name), "({:02x}{:02x}…)"), self.0[0], self.0[1])
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::hex_id::ParseIdError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                $crate::hex_id::parse(text).map(Self)
            }
        }
    };
}

#[cfg(test)]
#[allow(unreachable_pub, reason = "the macro defines public types")]
mod tests {
    hex_id! {
        /// An id of a test.
        pub struct TestId;
    }

    #[test]
    fn an_id_is_read_as_it_is_written_and_not_shown_whole_in_logs() {
        let id = TestId([0xab; 16]);
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(format!("{id:?}"), "TestId(abab…)");
        for bad in ["", "ab", "+b".repeat(16).as_str(), "g0".repeat(16).as_str(), "ab".repeat(17).as_str()] {
            assert!(bad.parse::<TestId>().is_err(), "{bad:?}");
        }
    }
}

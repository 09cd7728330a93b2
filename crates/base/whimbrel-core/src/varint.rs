//! LEB128 numbers: seven bits a byte, the lowest first; the top bit says that more bytes follow.

/// Cause of bytes that are no LEB128 number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VarintError {
    /// The bytes end before the number does.
    #[error("the bytes end in the middle of a number")]
    Short,
    /// The number needs more than 64 bits or has more bytes than it needs.
    #[error("a number has more bytes than it needs")]
    Malformed,
}

/// Appends `number` in its shortest form.
pub fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Removes a number from the front of `bytes`. Only the shortest form of a number is accepted.
pub fn take(bytes: &mut &[u8]) -> Result<u64, VarintError> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first().ok_or(VarintError::Short)?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if bits << shift >> shift != bits {
            return Err(VarintError::Malformed);
        }
        number |= bits << shift;
        if byte & 0x80 == 0 {
            let shortest = *byte != 0 || shift == 0;
            return if shortest { Ok(number) } else { Err(VarintError::Malformed) };
        }
    }
    Err(VarintError::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_number_is_read_as_it_was_written(number: u64, rest: Vec<u8>) {
            let mut bytes = Vec::new();
            put(&mut bytes, number);
            let length = bytes.len();
            bytes.extend(&rest);
            let mut left = &bytes[..];
            prop_assert_eq!(take(&mut left), Ok(number));
            prop_assert_eq!(left, &rest[..]);
            prop_assert_eq!(take(&mut &bytes[..length - 1]), Err(VarintError::Short));
        }

        #[test]
        fn bytes_that_are_read_are_the_only_form_of_their_number(bytes: [u8; 11]) {
            let mut left = &bytes[..];
            if let Ok(number) = take(&mut left) {
                let mut again = Vec::new();
                put(&mut again, number);
                prop_assert_eq!(&again[..], &bytes[..11 - left.len()]);
            }
        }
    }

    #[test]
    fn padded_and_overlong_numbers_are_refused() {
        assert_eq!(take(&mut &[0x80, 0][..]), Err(VarintError::Malformed));
        assert_eq!(take(&mut &[0xff; 11][..]), Err(VarintError::Malformed));
        let most = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];
        assert_eq!(take(&mut &most[..]), Ok(u64::MAX));
        assert_eq!(take(&mut &[&most[..9], &[2]].concat()[..]), Err(VarintError::Malformed));
    }
}

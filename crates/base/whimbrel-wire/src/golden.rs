//! Golden messages, for tests: the bytes of messages stay as long as the version of their protocol does.
//!
//! A file beside the tests of a protocol has its newest version and a line for each kind of message: the
//! bytes of a constant sample, or their length and digest if they are long. With `WHIMBREL_RENEW` set it is
//! written anew, for a new version or with new kinds of message, but never with other bytes for a version.
//!
//! [`sample`] derives the sample of a type from its fields, as [`serde`] sees them, so that every field and
//! every variant is in it.

use crate::{Call, PublicKey, VersionRange};
use serde::{
    Deserializer, Serialize,
    de::{
        DeserializeOwned, DeserializeSeed, EnumAccess, Error as _, IntoDeserializer, SeqAccess,
        VariantAccess, Visitor, value::Error,
    },
};
use std::{collections::BTreeMap, fmt::Write, fs, path::Path};
use whimbrel_core::Digest;

/// Longest sample that is written in full.
const IN_FULL: usize = 48;

/// Compares samples, one for each kind of message, with the file. Panics with the difference.
pub fn check(path: impl AsRef<Path>, versions: VersionRange, samples: &[(&str, Vec<u8>)]) {
    let (path, version) = (path.as_ref(), versions.newest);
    let text = render(version, samples);
    let known = fs::read_to_string(path).unwrap_or_default();
    if text == known {
        return;
    }
    let changed = changed(&known, &text);
    let at = path.display();
    assert!(
        changed.is_empty(),
        "{changed:?} changed, but version {version} stayed: add a version, with its reason"
    );
    let renew = std::env::var_os("WHIMBREL_RENEW").is_some();
    assert!(renew, "{at} is out of date: run the test with WHIMBREL_RENEW=1, and look at the difference");
    fs::write(path, text).expect("the file can be written");
}

/// Kind of a call, and the headers of the request and of its reply.
pub fn call<C: Call>() -> Vec<u8> {
    message(C::KIND, [sample::<C::Header>(), sample::<C::Reply>()])
}

/// Kind of a message, and its headers.
pub fn message(kind: u16, headers: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    kind.to_le_bytes().into_iter().chain(headers.into_iter().flatten()).collect()
}

/// Constant values of a type in postcard form, one after the other: enough of them that every variant of an
/// enum is in one, and every option and list is full and empty. Panics for a type that accepts none.
pub fn sample<T: Serialize + DeserializeOwned>() -> Vec<u8> {
    let (mut bytes, mut rounds, mut round) = (Vec::new(), 2, 0);
    while round < rounds {
        let mut source = Source { round, variants: 0 };
        let value = T::deserialize(&mut source).expect("a type that accepts the constants of this module");
        bytes.extend(postcard::to_stdvec(&value).expect("a value that can be encoded"));
        rounds = rounds.max(source.variants);
        round += 1;
    }
    bytes
}

/// A text that is a name and a public key too.
fn text() -> String {
    PublicKey([7; 32]).to_string()
}

/// Source of constant values.
struct Source {
    /// Number of the value; selects variants, and fills options and lists if it is even.
    round: usize,
    /// Most variants of an enum so far.
    variants: usize,
}

macro_rules! constants {
    ($($method:ident $visit:ident $value:expr;)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            visitor.$visit($value)
        }
    )*};
}

macro_rules! refused {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            Err(Error::custom(concat!(stringify!($method), " has no constant")))
        }
    )*};
}

impl<'de> Deserializer<'de> for &mut Source {
    type Error = Error;

    constants! {
        deserialize_u8 visit_u8 7;
        deserialize_u16 visit_u16 300;
        deserialize_u32 visit_u32 70_000;
        deserialize_u64 visit_u64 5_000_000_000;
        deserialize_u128 visit_u128 1 << 100;
        deserialize_i8 visit_i8 -3;
        deserialize_i16 visit_i16 -300;
        deserialize_i32 visit_i32 -70_000;
        deserialize_i64 visit_i64 -5_000_000_000;
        deserialize_f32 visit_f32 1.5;
        deserialize_f64 visit_f64 1.5;
        deserialize_str visit_string text();
        deserialize_string visit_string text();
        deserialize_bytes visit_bytes &[7; 32];
        deserialize_byte_buf visit_bytes &[7; 32];
    }

    refused! { deserialize_any deserialize_char deserialize_map deserialize_identifier deserialize_ignored_any }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(self.round.is_multiple_of(2))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.round.is_multiple_of(2) { visitor.visit_some(self) } else { visitor.visit_none() }
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let left = usize::from(self.round.is_multiple_of(2));
        visitor.visit_seq(Elements { source: self, left })
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, left: usize, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(Elements { source: self, left })
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        len: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_tuple(len, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_tuple(fields.len(), visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.variants = self.variants.max(variants.len());
        visitor.visit_enum(Variant { index: self.round % variants.len(), source: self })
    }

    fn is_human_readable(&self) -> bool {
        false
    }
}

struct Elements<'a> {
    source: &'a mut Source,
    left: usize,
}

impl<'de> SeqAccess<'de> for Elements<'_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        match self.left.checked_sub(1) {
            None => Ok(None),
            Some(left) => {
                self.left = left;
                seed.deserialize(&mut *self.source).map(Some)
            }
        }
    }
}

struct Variant<'a> {
    index: usize,
    source: &'a mut Source,
}

impl<'a, 'de> EnumAccess<'de> for Variant<'a> {
    type Error = Error;
    type Variant = &'a mut Source;

    fn variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<(T::Value, &'a mut Source), Error> {
        let index = IntoDeserializer::<Error>::into_deserializer(self.index as u32);
        Ok((seed.deserialize(index)?, self.source))
    }
}

impl<'de> VariantAccess<'de> for &mut Source {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Error> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_tuple(len, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_tuple(fields.len(), visitor)
    }
}

fn render(version: u16, samples: &[(&str, Vec<u8>)]) -> String {
    let mut text = format!("version {version}\n");
    for (name, bytes) in samples {
        let _ = match bytes.len() {
            0..=IN_FULL => writeln!(text, "{name} {}", hex(bytes)),
            long => writeln!(text, "{name} {long} bytes, {}", Digest::of(bytes)),
        };
    }
    text
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Messages of the known text that the new one lacks or has with other bytes; none if its version is new.
fn changed<'a>(known: &'a str, text: &str) -> Vec<&'a str> {
    let lines =
        |text: &'a str| text.lines().filter_map(|line| line.split_once(' ')).collect::<BTreeMap<_, _>>();
    let (known, new) = (lines(known), text.lines().filter_map(|line| line.split_once(' ')));
    let new: BTreeMap<_, _> = new.collect();
    if known.get("version") != new.get("version") {
        return Vec::new();
    }
    known.into_iter().filter(|(name, bytes)| new.get(name) != Some(bytes)).map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Serialize, serde::Deserialize)]
    enum Three {
        One(u8, Option<bool>),
        Two { text: String, list: Vec<u16> },
        None,
    }

    #[test]
    fn a_sample_has_every_variant_and_is_always_the_same() {
        let text = postcard::to_stdvec(&text()).unwrap();
        assert_eq!(sample::<Three>(), [&[0, 7, 1, 1][..], &[1], &text, &[0], &[2]].concat());
        assert_eq!(
            sample::<Option<u64>>(),
            [&[1][..], &postcard::to_stdvec(&5_000_000_000u64).unwrap(), &[0]].concat()
        );
    }

    #[test]
    fn bytes_may_change_only_with_the_version_and_kinds_may_be_added() {
        let known = render(1, &[("A", vec![1]), ("B", vec![2; 100])]);
        assert!(known.starts_with("version 1\nA 01\nB 100 bytes, "));
        let after = |version, samples: &[(&str, Vec<u8>)]| {
            changed(&known, &render(version, samples)).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(after(1, &[("A", vec![1]), ("B", vec![2; 100]), ("C", vec![])]), [""; 0]);
        assert_eq!(after(1, &[("A", vec![1, 0]), ("B", vec![3; 100])]), ["A", "B"]);
        assert_eq!(after(1, &[("A", vec![1])]), ["B"], "a message that is gone");
        assert_eq!(after(2, &[("A", vec![9])]), [""; 0]);
    }
}

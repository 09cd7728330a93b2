//! JSON in which an object is an object. serde reads a list of values as the fields of a struct in their
//! order, whose names it does not say; no document of the API allows that.

use serde::{
    Deserializer,
    de::{
        Error, IntoDeserializer, Unexpected, Visitor,
        value::{MapDeserializer, SeqDeserializer},
    },
    forward_to_deserialize_any,
};
use serde_json::Value;

/// A value that is read as a struct only if it is an object, and so are the values in it, but for the content
/// of enums.
pub(super) struct Strict(pub(super) Value);

impl IntoDeserializer<'_, serde_json::Error> for Strict {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Strict {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match self.0 {
            Value::Array(list) => visitor.visit_seq(SeqDeserializer::new(list.into_iter().map(Self))),
            Value::Object(fields) => {
                let fields = fields.into_iter().map(|(name, value)| (name, Self(value)));
                visitor.visit_map(MapDeserializer::new(fields))
            }
            plain => plain.deserialize_any(visitor),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        match self.0 {
            Value::Array(_) => Err(Error::invalid_type(Unexpected::Seq, &name)),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq
        tuple tuple_struct map identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use serde_json::json;
    use whimbrel_api::{RunRequest, SettingsRequest};

    #[test]
    fn a_list_is_no_object_wherever_it_stands() {
        let read = |value| SettingsRequest::deserialize(Strict(value)).is_ok();
        assert!(read(
            json!({"note": "a", "hardware": {"add_nics": [{"bridge": null}], "add_disks": [4096]}})
        ));
        assert!(read(json!({"labels": {"team": "shop", "old": null}, "autostart": null})));
        for list in [json!([]), json!({"hardware": []}), json!({"hardware": {"add_nics": [[null, null]]}})] {
            assert!(serde_json::from_value::<SettingsRequest>(list.clone()).is_ok(), "{list}");
            assert!(!read(list.clone()), "{list}");
        }
    }

    #[test]
    fn an_object_is_read_as_without_it() {
        let text = json!({
            "name": "web", "memory": 1 << 30, "disks": [{"path": "/d"}], "profile": "micro", "accel": "tcg",
            "nics": [{"bridge": "lan0", "mac": "52:54:00:00:00:01"}], "cloud_init": {"ssh_keys": ["k"]},
            "settings": {"autostart": {"kind": "on", "order": 1, "delay_s": 2}, "labels": {"a": "b"}},
        });
        let plain = serde_json::from_value::<RunRequest>(text.clone());
        match plain {
            Ok(plain) => assert_eq!(RunRequest::deserialize(Strict(text)).unwrap(), plain),
            Err(error) => panic!("{error}"),
        }
    }
}

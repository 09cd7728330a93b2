//! Macros for types that are stored or shown in logs as one text.

/// Implements `Serialize` by `Display` and `Deserialize` by `FromStr`.
#[macro_export]
macro_rules! serde_by_text {
    ($type:ty) => {
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let text = <String as serde::Deserialize>::deserialize(from)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

/// Implements a `Debug` that shows only the name: for handles with nothing inside for people.
#[macro_export]
macro_rules! opaque_debug {
    ($($type:ident),*) => {
        $(impl std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($type))
            }
        })*
    };
}

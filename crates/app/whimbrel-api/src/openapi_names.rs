//! Names in the OpenAPI document: what a client may send where the types have `MachineName` and the like.

use utoipa::{
    PartialSchema, ToSchema,
    openapi::{ObjectBuilder, RefOr, Schema, schema::Type},
};

/// Pattern of names: `whimbrel_core` has the rule in words.
const NAME: &str = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$";
/// Pattern of what names a capsule: a name, with an age or without, or an id.
pub(crate) const CAPSULE: &str =
    "^([A-Za-z0-9][A-Za-z0-9._-]{0,62}(@-[0-9]{1,15}(ms|s|m|h|d))?|[0-9a-f]{64})$";

/// Schema of the names of machines, hosts, capsules, networks, schedules and tokens.
#[derive(Debug)]
pub(crate) struct Name;

impl PartialSchema for Name {
    fn schema() -> RefOr<Schema> {
        let text = "1 to 63 letters, digits, '-', '_' or '.'; the first is a letter or a digit";
        ObjectBuilder::new().schema_type(Type::String).pattern(Some(NAME)).description(Some(text)).into()
    }
}

impl ToSchema for Name {}

//! Errors in the OpenAPI document: one response for each status, with an example for each code, and which of
//! them a call may answer with.
//!
//! Calls have beside these the response `default`, for codes of a later version. Operations end with the same
//! codes, in their state and not as a status.

use crate::{ApiError, ErrorCode};
use std::collections::BTreeMap;
use utoipa::openapi::{
    ContentBuilder, HttpMethod, Ref, RefOr, Response, ResponseBuilder, example::ExampleBuilder,
    path::OperationBuilder,
};

/// Codes of every call: who asks is judged first, and a daemon may have a fault.
const ALWAYS: &[ErrorCode] =
    &[ErrorCode::Unauthenticated, ErrorCode::Forbidden, ErrorCode::RateLimited, ErrorCode::Internal];
/// Codes of calls that name something, in the path, in a query or in the body.
const NAMING: &[ErrorCode] = &[ErrorCode::Invalid, ErrorCode::NotFound];
/// Codes of calls that change something. Those that ask other hosts or QEMU are most of them.
const CHANGING: &[ErrorCode] = &[
    ErrorCode::NameTaken,
    ErrorCode::Busy,
    ErrorCode::Unreachable,
    ErrorCode::Untrusted,
    ErrorCode::Damaged,
    ErrorCode::NoSpace,
    ErrorCode::QemuFailed,
    ErrorCode::Unsupported,
];
/// Codes of calls that read the store or ask another host.
const READING: &[ErrorCode] = &[
    ErrorCode::Busy,
    ErrorCode::Damaged,
    ErrorCode::Unreachable,
    ErrorCode::Untrusted,
    ErrorCode::Unsupported,
];

/// Adds the errors of a call to it.
pub(crate) fn add_errors(call: OperationBuilder, method: &HttpMethod, names: bool) -> OperationBuilder {
    let mut codes = ALWAYS.to_vec();
    if names {
        codes.extend(NAMING);
    }
    let changes = *method != HttpMethod::Get;
    codes.extend(if changes {
        CHANGING
    } else if names {
        READING
    } else {
        &[]
    });
    statuses(&codes).into_keys().fold(call, |call, status| {
        let response = Ref::from_response_name(response_name(status));
        call.response(status.to_string(), RefOr::<Response>::Ref(response))
    })
}

/// Every response of an error, by its name.
pub(crate) fn responses() -> impl Iterator<Item = (String, RefOr<Response>)> {
    statuses(&ErrorCode::ALL).into_iter().map(|(status, codes)| {
        let examples = codes.iter().map(|code| {
            let error = ApiError::new(*code, code.meaning());
            let value = serde_json::to_value(error).expect("an error has a JSON form");
            (code.as_str(), ExampleBuilder::new().summary(code.meaning()).value(Some(value)).build())
        });
        let content = ContentBuilder::new()
            .schema(Some(Ref::from_schema_name("ApiError")))
            .examples_from_iter(examples)
            .build();
        let meanings: Vec<String> =
            codes.iter().map(|code| format!("`{code}`: {}", code.meaning())).collect();
        let response =
            ResponseBuilder::new().description(meanings.join("; ")).content("application/json", content);
        (response_name(status), RefOr::T(response.build()))
    })
}

fn statuses(codes: &[ErrorCode]) -> BTreeMap<u16, Vec<ErrorCode>> {
    let mut statuses = BTreeMap::<u16, Vec<ErrorCode>>::new();
    codes.iter().for_each(|code| statuses.entry(code.http_status()).or_default().push(*code));
    statuses
}

fn response_name(status: u16) -> String {
    format!("Error{status}")
}

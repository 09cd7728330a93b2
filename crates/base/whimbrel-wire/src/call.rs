//! Calls: requests, replies and refusals, and the encoding of their typed headers.

use crate::{CallError, frame::MAX_HEADER};
use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::sync::Arc;

/// The order in which a request is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RequestOrder {
    /// At once, concurrently with others. Without a payload it may overtake requests sent before it.
    #[default]
    Any,
    /// After every earlier request of the same stream was answered. Streams do not wait for each other.
    Stream(u16),
}

/// A request, either sent or received.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Request {
    /// The message kind; its high byte names the engine, see [`crate::range`].
    pub kind: u16,
    /// Small typed header, at most 64 KiB.
    pub header: Bytes,
    /// Raw bytes, at most 8 MiB.
    pub payload: Bytes,
    /// Further bytes of the payload, which a sender need not copy together; none in what is received.
    pub rest: Vec<Bytes>,
    /// Order in which it is handled.
    pub order: RequestOrder,
}

/// A positive answer to a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reply {
    /// Small typed header, at most 64 KiB.
    pub header: Bytes,
    /// Raw bytes, at most 8 MiB.
    pub payload: Bytes,
}

/// The code of a refusal. Codes below 256 belong to the wire protocol, the others to the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Code(pub u16);

impl Code {
    /// No service answers this kind.
    pub const UNKNOWN_KIND: Code = Code(1);
    /// The caller lacks the right.
    pub const FORBIDDEN: Code = Code(2);
    /// The header does not decode.
    pub const BAD_HEADER: Code = Code(3);
    /// The handler failed without an answer.
    pub const INTERNAL: Code = Code(4);
    /// The requested thing does not exist.
    pub const NOT_FOUND: Code = Code(5);
    /// The answer exceeds the limits.
    pub const TOO_LONG: Code = Code(6);
    /// The two sides have no common version of the engine's messages.
    pub const VERSION: Code = Code(7);
}

/// A negative answer to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text} (code {})", code.0)]
pub struct Refusal {
    /// The cause, for programs.
    pub code: Code,
    /// The cause, for people; truncated to 1,000 characters when sent.
    pub text: String,
    /// Whether the same request may succeed later.
    pub retryable: bool,
}

/// The answer of a service to a request.
pub type Answer = Result<Reply, Refusal>;

/// A typed call: a kind and the types of its headers.
pub trait Call {
    /// The kind of the request.
    const KIND: u16;
    /// Header of the request.
    type Header: Serialize + DeserializeOwned;
    /// Header of the reply.
    type Reply: Serialize + DeserializeOwned;
}

impl Request {
    /// An unordered request of these parts.
    pub fn new(kind: u16, header: Bytes, payload: Bytes) -> Self {
        Self { kind, header, payload, rest: Vec::new(), order: RequestOrder::Any }
    }

    /// The request of the call `C`.
    pub fn of<C: Call>(header: &C::Header, payload: Bytes) -> Result<Self, CallError> {
        let header = encode(header).map_err(|error| header_error("encode", C::KIND, error))?;
        Ok(Self::new(C::KIND, header, payload))
    }

    /// Makes it an ordered request of `stream`.
    pub fn ordered(self, stream: u16) -> Self {
        Self { order: RequestOrder::Stream(stream), ..self }
    }

    /// The header as the type of the call `C`; a service returns the refusal with `?`.
    pub fn decode<C: Call>(&self) -> Result<C::Header, Refusal> {
        decode(&self.header).map_err(|error| Refusal::new(Code::BAD_HEADER, error.to_string()))
    }
}

impl Reply {
    /// The reply of the call `C`.
    pub fn of<C: Call>(header: &C::Reply, payload: Bytes) -> Answer {
        let header = encode(header).map_err(|error| Refusal::new(Code::INTERNAL, error.to_string()))?;
        Ok(Self { header, payload })
    }

    /// The header as the type of the call `C`.
    pub fn decode<C: Call>(&self) -> Result<C::Reply, CallError> {
        decode(&self.header).map_err(|error| header_error("decode", C::KIND, error))
    }
}

impl Refusal {
    /// A refusal that is not retryable.
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), retryable: false }
    }

    /// Refuses a kind that no service answers.
    pub fn unknown_kind(kind: u16) -> Self {
        Self::new(Code::UNKNOWN_KIND, format!("no service answers requests of kind {kind:#06x}"))
    }

    /// Marks the refusal as retryable.
    pub fn retryable(self) -> Self {
        Self { retryable: true, ..self }
    }

    /// Encodes flag byte, code and text without serde, so that every version can read a refusal.
    pub(crate) fn to_header(&self) -> Bytes {
        let text: String = self.text.chars().take(1000).collect();
        let mut out = vec![u8::from(self.retryable)];
        out.extend(self.code.0.to_le_bytes());
        out.extend(text.as_bytes());
        out.into()
    }

    pub(crate) fn from_header(header: &[u8]) -> Option<Self> {
        let ([retryable, low, high], text) = header.split_first_chunk()?;
        let (code, text) = (Code(u16::from_le_bytes([*low, *high])), String::from_utf8_lossy(text));
        Some(Self { code, text: text.chars().take(1000).collect(), retryable: *retryable != 0 })
    }
}

fn encode<T: Serialize>(header: &T) -> Result<Bytes, postcard::Error> {
    let bytes = postcard::to_stdvec(header)?;
    if bytes.len() > MAX_HEADER as usize {
        return Err(postcard::Error::SerializeBufferFull);
    }
    Ok(bytes.into())
}

/// Decodes a complete header: a remainder means that the sides disagree on its type.
fn decode<T: DeserializeOwned>(header: &[u8]) -> Result<T, postcard::Error> {
    match postcard::take_from_bytes(header)? {
        (value, []) => Ok(value),
        _ => Err(postcard::Error::DeserializeBadEncoding),
    }
}

fn header_error(action: &'static str, kind: u16, error: postcard::Error) -> CallError {
    CallError::Header { action, kind, source: Arc::new(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Add;

    impl Call for Add {
        const KIND: u16 = 0x0701;
        type Header = (u32, u32);
        type Reply = u64;
    }

    #[test]
    fn a_header_of_another_shape_is_refused() {
        let request = Request::of::<Add>(&(1, 2), Bytes::new()).unwrap();
        assert_eq!(request.decode::<Add>(), Ok((1, 2)));
        let long = Request { header: Bytes::from_static(&[1, 2, 3]), ..request.clone() };
        assert_eq!(long.decode::<Add>().unwrap_err().code, Code::BAD_HEADER);
        let short = Request { header: Bytes::from_static(&[1]), ..request };
        assert!(short.decode::<Add>().is_err());
    }

    #[test]
    fn a_refusal_survives_the_wire_and_long_texts_are_cut() {
        let refusal = Refusal::new(Code(300), "é".repeat(2000)).retryable();
        let seen = Refusal::from_header(&refusal.to_header()).unwrap();
        assert_eq!((seen.code, seen.retryable, seen.text.chars().count()), (Code(300), true, 1000));
        assert_eq!(Refusal::from_header(b"ab"), None);
    }
}

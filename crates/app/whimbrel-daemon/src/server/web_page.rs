//! Web page of a host: the files of `web/dist`, which are part of the program.
//!
//! They are the same for everybody and hold nothing of this host: what the web page shows it asks the API
//! for, with the token of its user. [`POLICY`] lets it load and call this host only, and lets no other site
//! put it into a frame.

use axum::{
    Router,
    http::{HeaderMap, HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use whimbrel_core::Digest;

/// What the web page may load and call. Scripts and styles come from files only; pictures may be drawn by the
/// page itself, as the pointers of guests are.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A file of the web page: its path, type and content.
type WebFile = (&'static str, &'static str, &'static [u8]);

macro_rules! files {
    ($($path:literal $file:literal $kind:literal;)*) => {
        &[$(($path, $kind, include_bytes!(concat!("../../../../../web/dist/", $file))),)*]
    };
}

const FILES: &[WebFile] = files! {
    "/" "index.html" "text/html; charset=utf-8";
    "/app.js" "app.js" "text/javascript; charset=utf-8";
    "/app.css" "app.css" "text/css; charset=utf-8";
    "/console.js" "console.js" "text/javascript; charset=utf-8";
    "/display.js" "display.js" "text/javascript; charset=utf-8";
    "/chart.js" "chart.js" "text/javascript; charset=utf-8";
    "/icon.svg" "icon.svg" "image/svg+xml";
    "/licences.txt" "licences.txt" "text/plain; charset=utf-8";
};

/// The files, for whoever asks: none of them needs a token.
pub(crate) fn routes() -> Router {
    FILES.iter().fold(Router::new(), |router, file| {
        let tag = format!("\"{}\"", Digest::of(file.2).short());
        router.route(file.0, get(async move |headers: HeaderMap| answer(file, &tag, &headers)))
    })
}

fn answer((_, kind, content): &WebFile, tag: &str, headers: &HeaderMap) -> Response {
    let head: [(HeaderName, &str); 7] = [
        (header::CONTENT_TYPE, kind),
        // The names of the files are those of every version, so a browser asks whether its copy is this one.
        (header::CACHE_CONTROL, "no-cache"),
        (header::ETAG, tag),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    let known = headers.get(header::IF_NONE_MATCH).is_some_and(|one| one.as_bytes() == tag.as_bytes());
    let head = head.map(|(name, value)| (name, value.to_owned()));
    match known {
        true => (StatusCode::NOT_MODIFIED, head).into_response(),
        false => (head, *content).into_response(),
    }
}

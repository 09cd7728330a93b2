//! Web page of a host, or of several: the files of `web/dist`, which are part of the program.
//!
//! They are the same for everybody and hold nothing of this host: what the web page shows it asks the API
//! for, with the token of its user. [`POLICY`] lets it load and call this host only, and lets no other site
//! put it into a frame.

use axum::{
    Router,
    body::Bytes,
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

/// What tells the page that it is one of several hosts, and that its calls begin with `/hosts/NAME`.
const OF_SEVERAL: &str = "<head><meta name=\"hosts\" content=\"several\" />";

/// The files, for whoever asks: none of them needs a token.
pub(crate) fn routes() -> Router {
    FILES.iter().fold(Router::new(), |router, (path, kind, content)| {
        with_file(router, (path, kind), Bytes::from_static(content))
    })
}

/// The files for a page of several hosts, which `whimbrel web` serves.
pub fn routes_of_several() -> Router {
    FILES.iter().fold(Router::new(), |router, (path, kind, content)| {
        let content = match (*path, std::str::from_utf8(content)) {
            ("/", Ok(index)) => index.replacen("<head>", OF_SEVERAL, 1).into(),
            _ => Bytes::from_static(content),
        };
        with_file(router, (path, kind), content)
    })
}

fn with_file(router: Router, (path, kind): (&'static str, &'static str), content: Bytes) -> Router {
    let tag = format!("\"{}\"", Digest::of(&content).short());
    router.route(path, get(async move |headers: HeaderMap| answer(kind, &content, &tag, &headers)))
}

fn answer(kind: &'static str, content: &Bytes, tag: &str, headers: &HeaderMap) -> Response {
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
        false => (head, content.clone()).into_response(),
    }
}

//! Client tests with scripted daemons on real Unix sockets: requests sent, and the handling of every kind of
//! reply.

use axum::{
    Json, Router,
    body::Body,
    http::{StatusCode, header},
    routing::{delete, get, post, put},
};
use serde_json::{Value, json};
use std::future::Future;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixListener,
};
use whimbrel_api::*;
use whimbrel_client::{Client, ClientError};

/// Serves `router` on a new socket while `test` runs.
async fn with_daemon<F: Future<Output = ()>>(router: Router, test: impl FnOnce(Client) -> F) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("host.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = tokio::spawn(async move { axum::serve(listener, router).await });
    test(Client::new(socket)).await;
    server.abort();
}

fn operation(state: Value) -> Value {
    let mut operation = json!({"id": 7, "kind": "gc", "subject": "store", "started_ms": 1,
        "progress": {"stage": "marking", "done": 1, "total": 2, "unit": "items", "rate_per_s": null, "detail": null}});
    operation.as_object_mut().unwrap().extend(state.as_object().unwrap().clone());
    operation
}

fn gc_result() -> Value {
    json!({"kind": "gc", "freed": 5, "stored": 6, "moved": 1, "packs_waiting": 0})
}

fn lines(text: String) -> Router {
    Router::new().route(routes::OPERATION_EVENTS, get(|| async move { text }))
}

#[tokio::test]
async fn a_body_arrives_as_it_was_sent_and_the_path_is_filled_in() {
    let echo = put(|path: axum::extract::Path<String>, body: Json<Value>| async move {
        assert_eq!((path.0.as_str(), &body.0), ("best", &json!({"capsule": "web"})));
        Json(json!({"id": "ab".repeat(32), "names": ["best"], "machine": "web", "active": true, "time_ms": 5,
            "host": "alpha", "memory": 1024, "images": [], "parents": [], "labels": {}}))
    });
    with_daemon(Router::new().route(routes::TAG, echo), |client| async move {
        let request = TagRequest { capsule: "web".parse().unwrap() };
        let tagged = client.tag(&"best".parse().unwrap(), &request).await.unwrap();
        assert_eq!(tagged.capsule.id.to_string(), "ab".repeat(32));
    })
    .await;
}

#[tokio::test]
async fn a_refusal_keeps_its_code_causes_and_hint() {
    let error = ApiError::new(ErrorCode::Busy, "web is being migrated").with_hint("wait");
    let answer = error.clone();
    let router = Router::new().route(
        routes::MACHINE_PAUSE,
        post(|| async move { (StatusCode::from_u16(answer.code.http_status()).unwrap(), Json(answer)) }),
    );
    with_daemon(router, |client| async move {
        let failed = client.pause(&"web".parse().unwrap()).await.unwrap_err();
        assert_eq!(failed.hint().as_deref(), Some("wait"));
        assert!(matches!(failed, ClientError::Api(ref got) if *got == error), "{failed:?}");
    })
    .await;
}

#[tokio::test]
async fn a_server_that_is_no_daemon_is_no_panic() {
    let router = Router::new().route(routes::HOST, get(|| async { "<html>" }));
    with_daemon(router, |client| async move {
        assert!(matches!(client.host().await, Err(ClientError::Protocol { .. })));
        let missing = client.machines().await.unwrap_err();
        assert!(matches!(missing, ClientError::Api(ref e) if e.message.contains("404")), "{missing:?}");
    })
    .await;
}

#[tokio::test]
async fn an_endless_answer_is_cut_off() {
    let log = get(|| async { "x".repeat(4097) });
    with_daemon(Router::new().route(routes::MACHINE_CONSOLE_LOG, log), |client| async move {
        let web = "web".parse().unwrap();
        assert!(matches!(
            client.console_log(&web, 4096).await,
            Err(ClientError::TooLarge { limit: 4096, .. })
        ));
        assert_eq!(client.console_log(&web, 4097).await.unwrap().len(), 4097);
    })
    .await;
}

#[tokio::test]
async fn no_daemon_and_a_left_over_socket_say_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("host.sock");
    let absent = Client::new(&socket).host().await.unwrap_err();
    assert!(matches!(absent, ClientError::NotRunning { .. }), "{absent:?}");
    assert!(absent.hint().unwrap().contains("whimbrel host"));
    drop(UnixListener::bind(&socket).unwrap());
    let left_over = Client::new(&socket).host().await.unwrap_err();
    assert!(matches!(left_over, ClientError::NotRunning { .. }), "{left_over:?}");
}

#[tokio::test]
async fn following_sees_every_snapshot_and_ends_with_the_operation() {
    let text = format!(
        "{}\n{}\n{}\n",
        operation(json!({"state": "running"})),
        operation(json!({"state": "running"})),
        operation(json!({"state": "succeeded", "result": gc_result()})),
    );
    with_daemon(lines(text), |client| async move {
        let mut seen = 0;
        let ended = client.watch_operation(OperationId(7), |_| seen += 1).await.unwrap();
        assert_eq!(seen, 3);
        assert!(matches!(ended.state, OperationState::Succeeded { result: OperationResult::Gc { .. } }));
    })
    .await;
}

#[tokio::test]
async fn a_daemon_that_dies_in_the_middle_of_an_operation_is_noticed() {
    let whole = format!("{}\n", operation(json!({"state": "running"})));
    let torn = format!("{whole}{}", operation(json!({"state": "running"})));
    for text in [String::new(), whole, torn] {
        with_daemon(lines(text), |client| async move {
            let lost = client.watch_operation(OperationId(7), |_| ()).await.unwrap_err();
            assert!(matches!(lost, ClientError::Lost { operation: OperationId(7) }), "{lost:?}");
        })
        .await;
    }
}

#[tokio::test]
async fn a_line_without_end_is_cut_off() {
    with_daemon(lines("x".repeat(5 << 20)), |client| async move {
        let endless = client.watch_operation(OperationId(7), |_| ()).await.unwrap_err();
        assert!(matches!(endless, ClientError::TooLarge { .. }), "{endless:?}");
    })
    .await;
}

#[tokio::test]
async fn the_console_is_a_clean_byte_stream_in_both_directions() {
    let console = get(|mut request: axum::extract::Request| async move {
        assert_eq!(request.headers()[header::UPGRADE], routes::CONSOLE_PROTOCOL);
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = hyper_util::rt::TokioIo::new(upgrade.await.unwrap());
            let mut asked = [0; 256];
            stream.read_exact(&mut asked).await.unwrap();
            asked.reverse();
            stream.write_all(&asked).await.unwrap();
            stream.shutdown().await.unwrap();
        });
        let head = axum::http::Response::builder().status(StatusCode::SWITCHING_PROTOCOLS);
        let head =
            head.header(header::CONNECTION, "upgrade").header(header::UPGRADE, routes::CONSOLE_PROTOCOL);
        head.body(Body::empty()).unwrap()
    });
    with_daemon(Router::new().route(routes::MACHINE_CONSOLE, console), |client| async move {
        let mut console = client.console(&"web".parse().unwrap()).await.unwrap();
        let every_byte: Vec<u8> = (0..=255).collect();
        console.write_all(&every_byte).await.unwrap();
        let mut answer = Vec::new();
        console.read_to_end(&mut answer).await.unwrap();
        answer.reverse();
        assert_eq!(answer, every_byte);
    })
    .await;
}

#[tokio::test]
async fn a_console_that_is_not_upgraded_is_refused() {
    let router = Router::new().route(routes::MACHINE_CONSOLE, get(|| async { "login:" }));
    with_daemon(router, |client| async move {
        let refused = client.console(&"web".parse().unwrap()).await.unwrap_err();
        assert!(matches!(refused, ClientError::Protocol { .. }), "{refused:?}");
    })
    .await;
}

#[tokio::test]
async fn an_answer_without_a_body_is_enough_for_a_removal() {
    let router = Router::new().route(routes::TRUST_ENTRY, delete(|| async { StatusCode::NO_CONTENT }));
    with_daemon(router, |client| async move { client.untrust(&"beta".parse().unwrap()).await.unwrap() })
        .await;
}

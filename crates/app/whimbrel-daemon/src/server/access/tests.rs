//! Tests of the gate: every call, by every role and scope, with the token as it was and revoked meanwhile,
//! through the router of a daemon without machines.

use super::{
    endpoints::{Endpoint, Reach},
    gate::Connected,
    *,
};
use crate::{core::sample, daemon::Daemon, server::http};
use axum::{
    Extension, Router,
    body::Body,
    http::{Method, Request},
    routing::MethodFilter,
};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use std::{collections::BTreeSet, path::Path};
use whimbrel_api::TokenRequest;

/// What each role may do, as docs/operations/remote.md says it. Calls about objects are about the machine or
/// capsule `web`; `*` is for callers without a scope only.
const DOCUMENTED: [(&str, &str); 3] = [
    (
        "viewer",
        "GET /v1/host, GET /v1/caller, GET /v1/openapi.json, GET /v1/machines, GET /v1/usage, \
         GET /v1/machines/{name}, GET /v1/machines/{name}/console/log, GET /v1/migrations, GET /v1/capsules, \
         GET /v1/capsules/{capsule}, GET /v1/capsules/{capsule}/log, GET /v1/capsules/{capsule}/graph, \
         GET /v1/graph, GET /v1/refs/{name}/history, GET /v1/capsules/{capsule}/diff/{other}, \
         GET /v1/operations, GET /v1/operations/{id}, GET /v1/operations/{id}/events, GET /v1/networks, \
         GET /v1/networks/{name}, GET /v1/images, GET /v1/events, \
         GET /v1/schedules, GET /v1/schedules/{name}, *GET /v1/capsules/{capsule}/rebase, \
         *POST /v1/match, *POST /v1/cpu/baseline, *GET /v1/remote/{host}, *GET /v1/cache, *GET /v1/trust, *GET /v1/hosts, *GET /v1/sessions, *GET /v1/pools, *GET /metrics",
    ),
    (
        "operator",
        "POST /v1/machines, DELETE /v1/machines/{name}, POST /v1/machines/{name}/start, \
         POST /v1/machines/{name}/stop, POST /v1/machines/{name}/pause, POST /v1/machines/{name}/unpause, \
         POST /v1/machines/{name}/upgrade, \
         POST /v1/machines/{name}/balloon, POST /v1/machines/{name}/settings, POST /v1/machines/{name}/rename, POST /v1/machines/{name}/exec, \
         POST /v1/machines/{name}/files/read, POST /v1/machines/{name}/files/write, GET /v1/machines/{name}/console, GET /v1/machines/{name}/display, \
         POST /v1/machines/{name}/wws, \
         POST /v1/machines/{name}/checkpoint, POST /v1/machines/{name}/suspend, POST /v1/machines/{name}/rewind, \
         POST /v1/machines/{name}/migrate, POST /v1/machines/{name}/protect, \
         DELETE /v1/machines/{name}/protect, POST /v1/machines/{name}/failover, POST /v1/resume, \
         POST /v1/clone, POST /v1/derive, POST /v1/promote, PUT /v1/tags/{tag}, \
         DELETE /v1/capsules/{capsule}, POST /v1/pull, POST /v1/push, POST /v1/machines/{name}/ports, \
         POST /v1/schedules, DELETE /v1/schedules/{name}, POST /v1/schedules/{name}/run, \
         POST /v1/images, DELETE /v1/operations/{id}, *POST /v1/evacuate, *POST /v1/store/gc, *POST /v1/buckets, *POST /v1/store/verify, \
         *POST /v1/store/repair, *GET /v1/store/encryption, *POST /v1/store/seal",
    ),
    (
        "admin",
        "POST /v1/machines/{name}/resolve, *POST /v1/export, *POST /v1/import, *POST /v1/cache, \
         *POST /v1/trust, *PUT /v1/trust/{name}, *DELETE /v1/trust/{name}, *GET /v1/tokens, \
         *POST /v1/tokens, *DELETE /v1/tokens/{name}, *POST /v1/networks, *POST /v1/networks/{name}/hosts, *DELETE /v1/networks/{name}, \
         *PUT /v1/store/key, *GET /v1/wire",
    ),
];

/// The documented role of a call, and whether it is for callers without a scope only.
fn documented(call: &str) -> (Role, bool) {
    let found = DOCUMENTED.iter().find_map(|(role, calls)| {
        let listed = calls.split(',').map(str::trim).find(|listed| listed.trim_start_matches('*') == call)?;
        Some((role.parse().unwrap(), listed.starts_with('*')))
    });
    found.unwrap_or_else(|| panic!("{call} is not documented"))
}

/// A body about the machine, or the capsule, `web`, that no handler carries out.
fn body(call: &str) -> Value {
    match call {
        // No machine can have so little memory.
        "POST /v1/machines" => json!({"name": "web", "memory": 1}),
        "POST /v1/machines/{name}/rename" => json!({"to": "web"}),
        "POST /v1/machines/{name}/exec" => json!({"command": ["true"]}),
        "POST /v1/machines/{name}/files/read" => json!({"path": "/etc/hostname", "length": 1}),
        "POST /v1/machines/{name}/files/write" => json!({"path": "/tmp/x", "data": ""}),
        "POST /v1/machines/{name}/balloon" => json!({"size": 1}),
        "POST /v1/machines/{name}/wws" => json!({"interval_ms": 100, "duration_ms": 100}),
        "POST /v1/machines/{name}/migrate" | "POST /v1/machines/{name}/protect" => json!({"host": "beta"}),
        "POST /v1/machines/{name}/rewind" => json!({"capsule": "web"}),
        "POST /v1/resume" => json!({"capsule": "web", "name": "web"}),
        "POST /v1/clone" => json!({"capsule": "web", "count": 2, "prefix": "web"}),
        "POST /v1/derive" => json!({"capsule": "web", "name": "web"}),
        "POST /v1/promote" | "PUT /v1/tags/{tag}" | "POST /v1/pull" => json!({"capsule": "web"}),
        "POST /v1/schedules" => {
            json!({"name": "web", "every_ms": 1, "work": {"kind": "checkpoint", "machine": "web"}})
        }
        "POST /v1/buckets" => json!({"bucket": "nowhere"}),
        "POST /v1/images" => json!({"name": "web"}),
        "POST /v1/push" => json!({"subject": "web", "host": "beta"}),
        "PUT /v1/store/key" => json!({"key_file": "nowhere"}),
        "POST /v1/export" => json!({"capsule": "web", "path": "/nonexistent/out", "format": "capsule"}),
        "POST /v1/import" => json!({"path": "/nonexistent/in", "name": "web", "format": "capsule"}),
        "POST /v1/match" => json!({"terms": "ram>=1M"}),
        "POST /v1/trust" => json!({"name": "web"}),
        "POST /v1/tokens" => json!({"name": "../web", "role": "viewer"}),
        _ => json!({}),
    }
}

struct Gate {
    daemon: Arc<Daemon>,
    access: Arc<Access>,
    router: Router,
    _folders: Held,
}

/// What a sample lives in: its runtime must not be dropped by a task.
struct Held(Option<sample::Folders>);

impl Drop for Held {
    fn drop(&mut self) {
        let folders = self.0.take();
        let _ = std::thread::spawn(move || drop(folders)).join();
    }
}

const REMOTE: Origin = Origin::Tcp(IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 9)));

impl Gate {
    fn new() -> Self {
        let (daemon, folders) = sample::daemon();
        let access = Access::open(&daemon.directories, Vec::new()).unwrap();
        let router = http::router(daemon.clone(), access.clone());
        Self { daemon, access, router, _folders: Held(Some(folders)) }
    }

    fn token(&self, name: &str, role: Role, scope: Option<&str>) -> String {
        let list = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        let (machines, capsules) = (scope.map(list), scope.map(list));
        let name = name.parse().unwrap();
        let request = TokenRequest { name, role, machines, capsules, expires_s: None };
        self.access.tokens.create(request).unwrap().token
    }

    async fn send(&self, origin: Origin, token: Option<&str>, call: &str, body: &Value) -> (u16, String) {
        let (method, path) = call.split_once(' ').unwrap();
        let mut request = Request::builder().method(method).uri(path);
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.body(Body::from(body.to_string())).unwrap();
        let connected = Connected { origin, known: Arc::default(), place: None };
        let answer = TowerToHyperService::new(self.router.clone().layer(Extension(connected)))
            .call(request)
            .await
            .unwrap();
        let status = answer.status().as_u16();
        let body = axum::body::to_bytes(answer.into_body(), 1 << 20).await.unwrap();
        (status, String::from_utf8_lossy(&body).into_owned())
    }

    /// Creates the schedule `web` of the machine `web`, if it is not there.
    fn create_schedule(&self) {
        let request =
            json!({"name": "web", "every_ms": 3_600_000, "work": {"kind": "checkpoint", "machine": "web"}});
        let actions = crate::schedule::Actions(self.daemon.clone());
        if let Err(error) = self.daemon.schedules.create(serde_json::from_value(request).unwrap(), &actions) {
            assert!(error.to_string().contains("already"), "{error}");
        }
    }

    fn audit(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.daemon.directories.audit().join("audit.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn filled(call: &str) -> String {
    if call == "GET /v1/events" {
        // Without that the answer never ends.
        return format!("{call}?follow=false");
    }
    let web = ["{name}", "{capsule}", "{other}", "{tag}", "{host}"];
    web.iter().fold(call.replace("{id}", "1000000"), |call, part| call.replace(part, "web"))
}

/// The entry of a call in the table.
fn entry(method: &str, path: &str) -> Option<Endpoint> {
    let method = MethodFilter::try_from(Method::from_bytes(method.as_bytes()).unwrap()).unwrap();
    Endpoint::ALL.iter().find(|one| one.method() == method && one.path() == path).copied()
}

#[test]
fn every_call_of_the_document_is_in_the_table_and_in_the_manual() {
    let table: BTreeSet<_> = whimbrel_api::documented_calls().collect();
    for (method, path) in &table {
        assert!(entry(method, path).is_some(), "{method} {path} has no entry");
    }
    assert_eq!(table.len(), Endpoint::ALL.len(), "an entry is there twice, or not in the document");
    for (method, path) in table {
        documented(&format!("{method} {path}"));
    }
    let listed: usize = DOCUMENTED.iter().map(|(_, calls)| calls.split(',').count()).sum();
    assert_eq!(listed, Endpoint::ALL.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_api_does_not_have_is_refused_in_its_form() {
    let gate = Gate::new();
    let token = gate.token("good", Role::Admin, None);
    for (call, status) in
        [("GET /v1/nowhere", 404), ("PATCH /v1/machines", 405), ("DELETE /v1/store/gc", 405)]
    {
        let (got, said) = gate.send(REMOTE, Some(&token), call, &Value::Null).await;
        let said: whimbrel_api::ApiError = serde_json::from_str(&said).expect(call);
        assert_eq!((got, said.hint.as_deref()), (status, Some("see /v1/openapi.json")), "{call}");
    }
}

/// Each call, role, and scope (none, one with `web`, one without), with the token valid and revoked.
#[tokio::test(flavor = "multi_thread")]
async fn every_call_is_judged_by_role_scope_and_the_token_of_this_moment() {
    let gate = Gate::new();
    let (mut tried, mut wrong) = (0, Vec::new());
    for role in Role::ALL {
        for (scope, patterns) in [("all", None), ("web", Some("web*,image.web")), ("other", Some("db*,x?"))] {
            let name = format!("{role}-{scope}");
            let token = gate.token(&name, role, patterns);
            for revoked in [false, true] {
                if revoked {
                    gate.access.tokens.revoke(&name.parse().unwrap()).unwrap();
                }
                for (method, path) in whimbrel_api::documented_calls() {
                    let call = format!("{method} {path}");
                    if path.contains("/schedules/{name}") {
                        gate.create_schedule();
                    }
                    // A socket of its own for each, as the limit of failed logins is tested elsewhere.
                    let from = Origin::Tcp(IpAddr::from(u32::to_be_bytes(0x0a00_0000 + tried)));
                    let (status, said) = gate.send(from, Some(&token), &filled(&call), &body(&call)).await;
                    let (needed, everything) = documented(&call);
                    let about_objects = entry(&method, path).unwrap().reach() == Reach::Objects;
                    // There is no such operation, which anybody may know.
                    let about_web = about_objects && !path.contains("{id}");
                    let fits = match scope {
                        "all" => true,
                        "web" => !everything,
                        _ => !everything && !about_web,
                    };
                    let expected = match (revoked, role >= needed && fits) {
                        (true, _) => 401,
                        (false, false) => 403,
                        (false, true) => 0,
                    };
                    // A host that is not trusted is refused with the same status, for another reason.
                    let refused = status == 401 || (status == 403 && said.contains("\"forbidden\""));
                    if refused != (expected != 0) || (refused && status != expected) {
                        wrong.push(format!("{call} as {name}, revoked: {revoked}: {status} {said}"));
                    }
                    tried += 1;
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {tried}:\n{}", wrong.len(), wrong.join("\n"));
    println!("{tried} requests judged");
    assert_eq!(tried as usize, 18 * Endpoint::ALL.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_without_a_token_gets_in_and_who_tries_too_often_has_to_wait() {
    let gate = Gate::new();
    for path in ["GET /v1/host", "GET /v1/openapi.json", "GET /nowhere"] {
        assert_eq!(gate.send(REMOTE, None, path, &Value::Null).await.0, 401, "{path}");
    }
    for _ in 3..login_limit::FAILURES_MAX {
        assert_eq!(gate.send(REMOTE, Some("guess"), "GET /v1/host", &Value::Null).await.0, 401);
    }
    let token = gate.token("good", Role::Viewer, None);
    assert_eq!(gate.send(REMOTE, Some(&token), "GET /v1/host", &Value::Null).await.0, 429);
    let elsewhere = Origin::Tcp(IpAddr::from([10, 0, 0, 10]));
    assert_eq!(gate.send(elsewhere, Some(&token), "GET /v1/host", &Value::Null).await.0, 200);
    let noted = gate.audit();
    assert_eq!(noted.len(), login_limit::FAILURES_MAX as usize, "the flood beyond is not noted");
    assert!(noted.iter().all(|entry| entry["outcome"] == "refused" && entry["from"] == "10.0.0.9"));
}

#[test]
fn users_of_the_socket_have_the_role_of_their_groups() {
    let (daemon, _folders) = sample::daemon();
    let groups = vec![("daemon".to_owned(), Role::Viewer), ("bin".to_owned(), Role::Operator)];
    let access = Access::open(&daemon.directories, groups).unwrap();
    let role = |uid, gid| access.identify(Origin::Socket { uid, gid }, None).ok().map(|who| who.role);
    assert_eq!(role(0, 0), Some(Role::Admin));
    // Group 1 is daemon and 2 is bin on every Debian.
    assert_eq!([role(4_000_000, 1), role(4_000_000, 2)], [Some(Role::Viewer), Some(Role::Operator)]);
    assert_eq!(role(4_000_000, 65_534), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_done_and_refused_is_noted_with_who_and_what() {
    let gate = Gate::new();
    let token = gate.token("ci", Role::Operator, Some("web*"));
    let run = |name: &str| json!({"name": name, "memory": 1});
    gate.send(REMOTE, Some(&token), "POST /v1/machines", &run("db")).await;
    gate.send(REMOTE, Some(&token), "POST /v1/machines/web/stop", &json!({})).await;
    gate.send(REMOTE, Some(&token), "GET /v1/machines", &Value::Null).await;
    let noted = gate.audit();
    assert_eq!(noted.len(), 2, "a successful read is not noted: {noted:?}");
    assert_eq!((&noted[0]["who"], &noted[0]["outcome"]), (&"token ci".into(), &"refused".into()));
    assert_eq!(noted[0]["objects"], json!(["machine db"]));
    assert_eq!((&noted[1]["path"], &noted[1]["status"]), (&"/v1/machines/web/stop".into(), &404.into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_the_host_are_for_admins_and_other_capsules_are_for_nobody_with_a_scope() {
    let gate = Gate::new();
    let disk = json!({"name": "web", "memory": 1, "disks": [{"path": Path::new("/etc/shadow")}]});
    let medium = json!({"name": "web", "memory": 1, "cdroms": ["/etc/shadow"]});
    let later = json!({"hardware": {"add_cdroms": ["/etc/shadow"]}});
    let operator = gate.token("operator", Role::Operator, None);
    let run = "POST /v1/machines";
    for (call, body) in [(run, &disk), (run, &medium), ("POST /v1/machines/web/settings", &later)] {
        let (status, said) = gate.send(REMOTE, Some(&operator), call, body).await;
        assert!(status == 403 && said.contains("file /etc/shadow"), "{call}: {status} {said}");
    }
    let secret = sample::capsule(&gate.daemon.store, 1, vec![], "secret");
    let open = sample::capsule(&gate.daemon.store, 2, vec![secret], "web-golden");
    let viewer = gate.token("viewer", Role::Viewer, Some("web*"));
    let get =
        async |path: String| gate.send(REMOTE, Some(&viewer), &format!("GET {path}"), &Value::Null).await;
    assert_eq!(get(format!("/v1/capsules/{open}")).await.0, 200);
    for hidden in [secret.to_string(), secret.to_string()[..12].to_owned(), "secret".to_owned()] {
        assert_eq!(get(format!("/v1/capsules/{hidden}")).await.0, 403, "{hidden}");
        assert_eq!(get(format!("/v1/capsules/{open}/diff/{hidden}")).await.0, 403, "{hidden}");
    }
    for list in ["/v1/capsules", "/v1/graph", &format!("/v1/capsules/{open}/log")] {
        let (status, said) = get(list.to_owned()).await;
        let all: Vec<Value> = serde_json::from_str(&said).unwrap();
        assert_eq!((status, all.len()), (200, 1), "{list}: {said}");
    }
}

#[tokio::test]
async fn a_browser_shows_its_token_among_the_subprotocols_and_other_sites_are_refused() {
    let gate = Gate::new();
    let token = gate.token("olga", Role::Operator, None);
    let send = async |headers: &[(&str, &str)]| {
        let mut request = Request::builder().uri("/v1/machines/web/console");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let connected = Connected { origin: REMOTE, known: Arc::default(), place: None };
        let router = TowerToHyperService::new(gate.router.clone().layer(Extension(connected)));
        router.call(request.body(Body::empty()).unwrap()).await.unwrap().status().as_u16()
    };
    let offered = format!("whimbrel-console, bearer.{token}");
    // 400: it is known who asks, and the rest of a WebSocket's head is missing.
    assert_eq!(send(&[("sec-websocket-protocol", &offered)]).await, 400);
    assert_eq!(send(&[("sec-websocket-protocol", "whimbrel-console, bearer.guess")]).await, 401);
    assert_eq!(send(&[("sec-websocket-protocol", &offered), ("sec-fetch-site", "same-origin")]).await, 400);
    // More of them than failed logins that an address may have, and none counts as one.
    for site in ["cross-site", "same-site"].iter().cycle().take(30) {
        assert_eq!(send(&[("sec-fetch-site", site)]).await, 403);
    }
    assert_eq!(send(&[("sec-websocket-protocol", &offered)]).await, 400);
}

#[tokio::test]
async fn a_caller_is_told_which_calls_are_allowed() {
    let gate = Gate::new();
    for (name, role, scope) in [("vera", Role::Viewer, None), ("ci", Role::Operator, Some("web*"))] {
        let token = gate.token(name, role, scope);
        let (status, text) = gate.send(REMOTE, Some(&token), "GET /v1/caller", &json!({})).await;
        let caller: whimbrel_api::CallerInfo = serde_json::from_str(&text).unwrap();
        assert_eq!((status, caller.role), (200, role), "{text}");
        for call in Endpoint::ALL.iter().map(|call| call.text()) {
            let (least, unscoped) = documented(&call);
            let allowed = role >= least && (scope.is_none() || !unscoped);
            assert_eq!(caller.calls.contains(&call), allowed, "{name}: {call}");
        }
    }
}

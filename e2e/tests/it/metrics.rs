//! Metrics: a real Prometheus reads a pair of hosts, a pool and a session, and every alert and panel means
//! something to it.

use serde_json::Value;
use std::{
    fs,
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use whimbrel_e2e::{Cluster, Guest, PATIENCE};
use whimbrel_testkit::{guest::Work, lab::Process};

const PROMETHEUS: &str = "127.0.0.1:9090";

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging")
}

/// Runs `promtool`, which is to find nothing wrong.
fn promtool(arguments: &[&str], input: &str) {
    let mut command = Command::new("promtool");
    command.args(arguments).current_dir(packaging().join("prometheus"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut tool = command.spawn().expect("promtool: run scripts/bootstrap");
    tool.stdin.take().expect("its input").write_all(input.as_bytes()).expect("room for a page");
    let output = tool.wait_with_output().expect("its end");
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "promtool {arguments:?}: {text:?}");
}

/// A Prometheus among the hosts, with all that it has stored.
struct Prometheus<'a> {
    cluster: &'a Cluster,
    process: Process,
    folder: tempfile::TempDir,
    begun: f64,
}

impl<'a> Prometheus<'a> {
    /// Starts one that reads these addresses every second.
    fn start(cluster: &'a Cluster, targets: &[String]) -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        let rules = packaging().join("prometheus/alerts.yml");
        let settings = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\n\
             rule_files: [{rules:?}]\n\
             scrape_configs: [{{job_name: whimbrel, static_configs: [{{targets: {targets:?}}}]}}]\n"
        );
        let file = folder.path().join("prometheus.yml");
        fs::write(&file, settings).expect("settings");
        let log = fs::File::create(folder.path().join("log")).expect("a log");
        let mut command = Command::new("prometheus");
        command.arg(format!("--config.file={}", file.display()));
        command.arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()));
        command.arg(format!("--web.listen-address={PROMETHEUS}"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let process = cluster.lab.host("client").command(command).expect("prometheus: run scripts/bootstrap");
        Self { cluster, process, folder, begun: now() }
    }

    /// Asks its API; the `data` of the answer.
    fn ask(&self, path: &str) -> Result<Value, String> {
        let address = PROMETHEUS.parse().expect("an address");
        let client = self.cluster.lab.host("client");
        let mut stream = client.connect(address, PATIENCE).map_err(|error| error.to_string())?;
        let request = format!("GET {path} HTTP/1.0\r\n\r\n");
        let mut answer = String::new();
        let asked = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_string(&mut answer));
        asked.map_err(|error| error.to_string())?;
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        let mut answer: Value = serde_json::from_str(body).map_err(|error| format!("{error}: {body}"))?;
        match answer["status"].as_str() {
            Some("success") => Ok(answer["data"].take()),
            _ => Err(answer.to_string()),
        }
    }

    /// Series of an expression since the start, as a panel asks for them.
    fn range(&self, expression: &str) -> Result<usize, String> {
        let (begun, now) = (self.begun, now());
        let query = encoded(expression);
        let answer =
            self.ask(&format!("/api/v1/query_range?query={query}&start={begun}&end={now}&step=1"))?;
        Ok(answer["result"].as_array().map_or(0, Vec::len))
    }

    /// Waits until an expression has had a value.
    fn wait(&self, expression: &str) {
        self.wait_for(expression, "something");
    }

    fn wait_for(&self, expression: &str, what: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !matches!(self.range(expression), Ok(1..)) {
            let log = || fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            let found = || format!("{expression}: {:?}\n{}", self.range(expression), log());
            assert!(Instant::now() < deadline, "nothing for {what}: {}", found());
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for Prometheus<'_> {
    fn drop(&mut self) {
        // It goes with the cluster's namespaces in any case; its folder must not go before it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The metrics at an address, as a host of the lab reads them.
fn page(cluster: &Cluster, from: &str, address: &str) -> Option<String> {
    let address = address.parse().expect("an address");
    let mut stream = cluster.lab.host(from).connect(address, Duration::from_secs(2)).ok()?;
    let mut answer = String::new();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").ok()?;
    stream.read_to_string(&mut answer).ok()?;
    Some(answer.split_once("\r\n\r\n")?.1.to_owned())
}

/// Waits until the metrics at an address of alpha have this text.
fn wait_page(cluster: &Cluster, address: &str, text: &str) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let page = page(cluster, "alpha", address).unwrap_or_default();
        if page.contains(text) {
            return page;
        }
        assert!(Instant::now() < deadline, "{address} has no {text}: {page}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The program under test, beside this one.
fn program() -> PathBuf {
    let me = std::env::current_exe().expect("the path of this program");
    let beside = me.ancestors().skip(1).take(2).map(|folder| folder.join("whimbrel"));
    beside.into_iter().find(|path| path.is_file()).expect("the whimbrel binary in the target directory")
}

/// What a command prints, which is to succeed.
fn print(arguments: &[&str]) -> String {
    let output = Command::new(program()).args(arguments).output().expect("the whimbrel binary");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("letters").trim().to_owned()
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_secs_f64()
}

fn encoded(text: &str) -> String {
    let letter = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    text.bytes().map(letter).collect()
}

/// Title and expressions of each panel of a dashboard, with the variables filled in.
fn panels(dashboard: &str) -> Vec<(String, String)> {
    let text = fs::read_to_string(packaging().join("grafana").join(dashboard)).expect("a dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("a dashboard in JSON");
    let mut found = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().expect("an expression");
            let expression = expression.replace("$__rate_interval", "10s");
            let all = |expression: String, name: &&str| expression.replace(*name, ".*");
            let variables = ["$instance", "$machine", "$benefactor", "$session"];
            let expression = variables.iter().fold(expression, all);
            assert!(!expression.contains('$'), "a variable without a value: {expression}");
            found.push((panel["title"].as_str().expect("a title").to_owned(), expression));
        }
    }
    found
}

/// A dashboard has more panels than that, and something for each once two scrapes have it.
fn assert_full(prometheus: &Prometheus<'_>, dashboard: &str, least: usize) {
    let panels = panels(dashboard);
    assert!(panels.len() > least, "{dashboard} has {} panels", panels.len());
    for (title, expression) in panels {
        prometheus.wait_for(&expression, &format!("{title} of {dashboard}"));
    }
}

/// Makes everything happen that a panel shows.
fn make_events(cluster: &Cluster, prometheus: &Prometheus<'_>) {
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    prometheus.wait("up == 1");
    alpha.run(&["checkpoint", "web"]);
    prometheus.wait("increase(whimbrel_checkpoint_pause_seconds_count[10s]) > 0");
    alpha.run(&["suspend", "web"]);
    alpha.run(&["resume", "web"]);
    prometheus.wait("increase(whimbrel_page_wait_seconds_count[10s]) > 0");
    // Slow enough to be seen, and let go as soon as it was.
    let mut moving = alpha.start_command(&["migrate", "web", "beta", "--rate-max", "20Mbit"]);
    prometheus.wait("whimbrel_machine_migration_data_remaining_bytes > 0");
    assert!(moving.wait().expect("its end").success());
    prometheus.wait("increase(whimbrel_migration_downtime_seconds_count[10s]) > 0");
    beta.run(&["protect", "web", "alpha", "--lease", "2s"]);
    prometheus.wait("increase(whimbrel_machine_epochs_total[10s]) > 5");
    beta.run(&["failover", "web"]);
    prometheus.wait("whimbrel_takeovers_total == 1");
}

#[test]
fn the_alerts_are_right_and_fire_when_they_should() {
    promtool(&["check", "rules", "alerts.yml"], "");
    promtool(&["test", "rules", "alerts_test.yml"], "");
}

#[test]
fn a_prometheus_that_reads_two_hosts_has_something_for_every_panel() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let work = Work::Dirty { region_mib: 8, pages_per_second: 500, bytes_per_page: 64 };
    Guest { work, ..Guest::small("web") }.run(&cluster, cluster.host("alpha"));
    let targets: Vec<String> = cluster.hosts.iter().map(|host| host.metrics_address()).collect();
    let prometheus = Prometheus::start(&cluster, &targets);
    make_events(&cluster, &prometheus);
    assert_full(&prometheus, "whimbrel-hosts.json", 30);

    let groups = prometheus.ask("/api/v1/rules").expect("rules");
    let groups = groups["groups"].as_array().expect("groups").iter();
    let rules: Vec<&Value> = groups.flat_map(|group| group["rules"].as_array().expect("rules")).collect();
    let unwell: Vec<&&Value> = rules.iter().filter(|rule| rule["health"] != "ok").collect();
    assert!(rules.len() >= 20 && unwell.is_empty(), "{unwell:#?}");
    prometheus.wait("ALERTS{alertname=\"WhimbrelTookOver\"}");
    assert_eq!(prometheus.range("ALERTS{alertname=\"WhimbrelMachineCrashed\"}"), Ok(0));

    for host in &cluster.hosts {
        let page = page(&cluster, "client", &host.metrics_address()).expect("a page");
        promtool(&["check", "metrics"], &page);
    }
}

/// Starts a manager, a benefactor, a server of sessions and a session, and mounts the pool. The pages of the
/// first four are at ports 7481 to 7484 of the address.
fn start_daemons(cluster: &Cluster, metrics: &str) -> [(Process, String); 5] {
    let at = |name: &str| {
        let path = cluster.disk.path().join(name);
        fs::create_dir(&path).expect("a directory");
        path.to_str().expect("a path in UTF-8").to_owned()
    };
    let [manager, b1, vms, mnt, server, client, pool] =
        ["m", "b1", "vms", "mnt", "server", "client", "pool"].map(at);
    let pool_key = |folder: &str| print(&["pool", "key", "--data", folder]);
    let session_key = |folder: &str| print(&["session", "key", "--keys-dir", folder]);
    let start = |words: &str| {
        let words: Vec<&str> = words.split_whitespace().collect();
        cluster.host("alpha").start_program(program().to_str().expect("a path in UTF-8"), &words)
    };
    print(&["pool", "admit", "--data", &manager, "b1", &pool_key(&b1)]);
    print(&["pool", "admit", "--data", &manager, "me", &pool_key(&client)]);
    let address = format!("127.0.0.1:7500/{}", pool_key(&manager));
    let (key, allowed) = (session_key(&server), session_key(&client));
    [
        format!("pool manager --data {manager} --listen 127.0.0.1:7500 --metrics-listen {metrics}:7481"),
        format!(
            "pool benefactor --name b1 --data {b1} --capacity 64M --keep-free 0 --manager {address} \
             --listen 127.0.0.1:7501 --metrics-listen {metrics}:7482"
        ),
        format!(
            "serve {vms} --listen 127.0.0.1:7788 --allow {allowed} --keys-dir {server} \
             --metrics-listen {metrics}:7483"
        ),
        format!(
            "mount 127.0.0.1:7788:{vms} {mnt} --foreground --key {key} --keys-dir {client} \
             --control-dir {client} --cache-dir {client}/cache --metrics-listen {metrics}:7484"
        ),
        format!("mount pool:{address} {pool} --keys-dir {client}"),
    ]
    .map(|words| {
        let process = start(&words);
        if let Some((_, port)) = words.split_once(&format!("--metrics-listen {metrics}:")) {
            // Each but the first needs the one before it.
            wait_page(cluster, &format!("{metrics}:{port}"), "process_open_fds");
        }
        (process, words)
    })
}

#[test]
fn a_prometheus_that_reads_a_pool_and_a_session_has_something_for_every_panel() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let address = alpha.metrics_address();
    let metrics = address.split(':').next().expect("an address");
    let _running = start_daemons(&cluster, metrics);
    for (port, line) in [
        (7481, "whimbrel_pool_benefactor_online{benefactor=\"b1\"} 1\n"),
        (7482, "whimbrel_benefactor_capacity_bytes 67108864\n"),
        (7483, "whimbrel_server_sessions 1\n"),
        (7484, "whimbrel_session_connected{session=\"mnt\"} 1\n"),
    ] {
        promtool(&["check", "metrics"], &wait_page(&cluster, &format!("{metrics}:{port}"), line));
    }
    let targets: Vec<String> = (7481..=7484).map(|port| format!("{metrics}:{port}")).collect();
    let prometheus = Prometheus::start(&cluster, &targets);
    let [mnt, pool] = ["mnt", "pool"].map(|name| cluster.disk.path().join(name));
    let write = "until mountpoint -q \"$2\"; do sleep 0.1; done; seq 200000 >\"$1/f\"; cat \"$1/f\" >\"$2/f\"; cat \"$2/f\"";
    let [mnt, pool] = [&mnt, &pool].map(|path| path.to_str().expect("a path in UTF-8"));
    alpha.exec("sh", &["-euc", &format!("({write}) >/dev/null"), "sh", mnt, pool]);
    prometheus.wait("whimbrel_pool_logical_bytes > 1000000");
    prometheus.wait("rate(whimbrel_pool_request_duration_seconds_count{call=\"put-chunks\"}[10s]) >= 0");
    prometheus.wait("rate(whimbrel_session_requests_total[10s]) >= 0");
    assert_full(&prometheus, "whimbrel-pool.json", 25);
    assert_full(&prometheus, "whimbrel-sessions.json", 25);
    assert_eq!(prometheus.range("ALERTS{alertstate=\"firing\"}"), Ok(0));
    alpha.exec("umount", &[pool]);
    alpha.exec("umount", &[mnt]);
}

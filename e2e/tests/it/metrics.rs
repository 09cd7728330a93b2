//! Metrics: a real Prometheus reads a pair of hosts, and every alert and panel means something to it.

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
    /// Starts one that reads both hosts every second.
    fn start(cluster: &'a Cluster) -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        let rules = packaging().join("prometheus/alerts.yml");
        let targets: Vec<String> = cluster.hosts.iter().map(|host| host.metrics_address()).collect();
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
        let deadline = Instant::now() + PATIENCE;
        while !matches!(self.range(expression), Ok(1..)) {
            let log = || fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "{expression}: {:?}\n{}", self.range(expression), log());
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

/// Title and expressions of each panel, with the variables filled in.
fn panels() -> Vec<(String, String)> {
    let text = fs::read_to_string(packaging().join("grafana/whimbrel-hosts.json")).expect("a dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("a dashboard in JSON");
    let mut found = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().expect("an expression");
            let expression = expression.replace("$__rate_interval", "10s");
            let expression = expression.replace("$instance", ".*").replace("$machine", ".*");
            assert!(!expression.contains('$'), "a variable without a value: {expression}");
            found.push((panel["title"].as_str().expect("a title").to_owned(), expression));
        }
    }
    found
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
    // Slow enough for some rounds to be seen.
    alpha.run(&["migrate", "web", "beta", "--rate-max", "60Mbit"]);
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
    let prometheus = Prometheus::start(&cluster);
    make_events(&cluster, &prometheus);

    let empty = |(title, expression): &(String, String)| match prometheus.range(expression) {
        Ok(0) => Some(format!("{title}: nothing for {expression}")),
        Ok(_) => None,
        Err(error) => Some(format!("{title}: {error}")),
    };
    let panels = panels();
    let empty: Vec<String> = panels.iter().filter_map(empty).collect();
    assert!(panels.len() > 30 && empty.is_empty(), "{empty:#?}");

    let groups = prometheus.ask("/api/v1/rules").expect("rules");
    let groups = groups["groups"].as_array().expect("groups").iter();
    let rules: Vec<&Value> = groups.flat_map(|group| group["rules"].as_array().expect("rules")).collect();
    let unwell: Vec<&&Value> = rules.iter().filter(|rule| rule["health"] != "ok").collect();
    assert!(rules.len() >= 20 && unwell.is_empty(), "{unwell:#?}");
    assert!(matches!(prometheus.range("ALERTS{alertname=\"WhimbrelTookOver\"}"), Ok(1..)));
    assert_eq!(prometheus.range("ALERTS{alertname=\"WhimbrelMachineCrashed\"}"), Ok(0));

    for host in &cluster.hosts {
        let mut page = String::new();
        let address = host.metrics_address().parse().expect("an address");
        let mut stream = cluster.lab.host("client").connect(address, PATIENCE).expect("a page");
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("a request");
        stream.read_to_string(&mut page).expect("a page");
        promtool(&["check", "metrics"], page.split_once("\r\n\r\n").expect("a page").1);
    }
}

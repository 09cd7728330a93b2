//! Metrics of the daemons other than that of a host: pages for Prometheus, and their listener.

mod pool;
mod session;

pub(crate) use pool::{benefactor_page, manager_page, status_page};
pub(crate) use session::{client_page, server_page, session_page};

use crate::error::CliError;
use std::net::SocketAddr;

/// Option of every such daemon.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct MetricsListener {
    /// Address for Prometheus, without TLS or a key, like 127.0.0.1:7481
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics_listen: Option<SocketAddr>,
}

impl MetricsListener {
    /// Serves pages on the runtime of the caller, if there is an address. An address that cannot be used is
    /// an error.
    pub(crate) async fn start<F, P>(self, page: F) -> Result<(), CliError>
    where
        F: Fn() -> P + Send + Sync + 'static,
        P: Future<Output = String> + Send + 'static,
    {
        if let Some(address) = self.metrics_listen {
            let listener = whimbrel_metrics::bind(address).await;
            let listener = listener.map_err(CliError::io("listen for metrics"))?;
            tokio::spawn(whimbrel_metrics::serve(listener, page));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fmt::Write as _, fs, path::Path};
    use whimbrel_metrics::Metric;

    /// The part of the manual that lists the metrics, between its two marks.
    fn tables() -> String {
        let daemons: [(&str, Vec<Metric>); 5] = [
            ("Daemon of a host", whimbrel_daemon::metrics()),
            ("Manager of a pool", pool::manager_metrics()),
            ("Benefactor", pool::benefactor_metrics()),
            ("Server of sessions", session::server_metrics()),
            ("Session", session::client_metrics()),
        ];
        let mut text = String::new();
        for (daemon, metrics) in daemons {
            let _ = write!(
                text,
                "\n### {daemon}\n\n| Metric | MetricKind | Labels | Meaning |\n|---|---|---|---|\n"
            );
            for Metric { name, kind, labels, help } in metrics {
                let labels = labels.join(", ");
                let _ = writeln!(text, "| `{name}` | {} | {labels} | {help} |", kind.name());
            }
        }
        text
    }

    #[test]
    fn the_manual_lists_every_metric() {
        const BEGIN: &str = "<!-- metrics -->\n";
        const END: &str = "\n<!-- end of metrics -->";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/operations/metrics.md");
        let text = fs::read_to_string(&path).expect("the manual");
        let (before, rest) = text.split_once(BEGIN).expect("the first mark");
        let (_, after) = rest.split_once(END).expect("the last mark");
        let right = format!("{before}{BEGIN}{}{END}{after}", tables());
        if std::env::var_os("WHIMBREL_RENEW").is_some() {
            fs::write(&path, &right).expect("the manual, renewed");
        } else {
            assert!(right == text, "docs/operations/metrics.md is old: run this test with WHIMBREL_RENEW=1");
        }
    }

    #[test]
    fn names_say_their_unit_and_a_counter_that_it_is_one() {
        let lists = [
            whimbrel_daemon::metrics(),
            pool::manager_metrics(),
            pool::benefactor_metrics(),
            session::server_metrics(),
            session::client_metrics(),
        ];
        for metric in lists.concat() {
            let Metric { name, kind, help, .. } = metric;
            let is_counter = kind == whimbrel_metrics::MetricKind::Counter;
            assert_eq!(name.ends_with("_total"), is_counter, "{name}");
            assert!(!name.contains("_ms") && !name.ends_with("_percent"), "{name}: base units only");
            assert!(help.ends_with('.') && !help.contains('\n'), "{name}: {help}");
        }
    }
}

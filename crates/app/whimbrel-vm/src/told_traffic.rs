//! Traffic that a machine process tells: whoever connects to its socket gets the counters in one packet. The
//! daemon asks for them when its metrics are read, and the machine notices nothing of it.

use crate::{
    channel::{Channel, ChannelError},
    running::{Traffic, TrafficView},
    runtime_dir,
};
use std::{error::Error, path::Path, time::Duration};

/// Question for the counters; its content says nothing.
const QUESTION_TEXT: &[u8] = b"?";
/// Time for a process to answer.
const PATIENCE: Duration = Duration::from_millis(500);

/// Time for a process that has connected to ask, while nobody else is served.
const QUESTION: Duration = Duration::from_millis(100);

/// Tells the counters of `view` to the process at the other end of `channel`, once it has asked: it cannot
/// see whose end of the channel is closed already.
pub(crate) fn send_to(channel: &Channel, view: &TrafficView) {
    // Always encodable: numbers and names.
    let text = serde_json::to_vec(&view.read()).unwrap_or_default();
    let told = channel.receive(QUESTION).and_then(|_| channel.send(&text, &[]));
    if let Err(error) = told {
        tracing::debug!(error = &error as &dyn Error, "could not tell the traffic of the machine");
    }
}

/// Asks the process that has the machine of a runtime directory for its counters.
pub(crate) fn ask(slot: &Path) -> Option<Traffic> {
    let asked = Channel::connect_within(&runtime_dir::traffic_socket(slot), PATIENCE);
    let answer = asked.and_then(|channel| {
        channel.send(QUESTION_TEXT, &[])?;
        channel.receive(PATIENCE)
    });
    let log = |error: &ChannelError| {
        tracing::debug!(error = error as &dyn Error, "the process of a machine does not tell its traffic");
    };
    let answer = answer.inspect_err(log).ok()?;
    serde_json::from_slice(&answer.bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::Listener;

    #[test]
    fn a_process_that_hangs_or_is_gone_has_no_counters() {
        let slot = tempfile::tempdir().unwrap();
        assert_eq!(ask(slot.path()), None, "nobody listens");
        let listener = Listener::bind(&runtime_dir::traffic_socket(slot.path())).unwrap();
        // More than the kernel lets wait.
        for _ in 0..4 {
            assert_eq!(ask(slot.path()), None);
        }
        drop(listener);
        assert_eq!(TrafficView::InProcess(slot.path().to_owned()).read(), Traffic::default());
    }

    #[test]
    fn a_process_tells_its_counters() {
        let slot = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&runtime_dir::traffic_socket(slot.path())).unwrap();
        for _ in 0..200 {
            let asked = std::thread::scope(|scope| {
                scope.spawn(|| {
                    send_to(&listener.accept(Duration::from_secs(10)).unwrap(), &TrafficView::None)
                });
                ask(slot.path())
            });
            assert_eq!(asked, Some(Traffic::default()));
        }
    }
}

//! Pending signals of a thread that waits for a lock. The FUSE library does not pass on that the kernel has
//! interrupted a request, so the signals of the thread are looked at (proc_pid_status(5)).

use std::fs;

/// Whether a thread has a signal to handle, or has ended.
pub(super) fn is_interrupted(thread: u32) -> bool {
    match fs::read_to_string(format!("/proc/{thread}/status")) {
        Ok(status) => has_signal(&status),
        Err(_) => true,
    }
}

fn has_signal(status: &str) -> bool {
    let set = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        u64::from_str_radix(line.trim(), 16).ok()
    };
    let [thread, process, blocked, ignored] =
        ["SigPnd:", "ShdPnd:", "SigBlk:", "SigIgn:"].map(|name| set(name).unwrap_or(0));
    (thread | process) & !blocked & !ignored != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_signal_that_the_thread_will_get_interrupts_it() {
        let status = |pending: &str, shared: &str, blocked: &str, ignored: &str| {
            format!(
                "Name:\tx\nSigPnd:\t{pending}\nShdPnd:\t{shared}\nSigBlk:\t{blocked}\nSigIgn:\t{ignored}\n"
            )
        };
        assert!(!has_signal(&status("0", "0", "0", "0")));
        assert!(has_signal(&status("0", "0000000000000100", "0", "0")), "killed");
        assert!(has_signal(&status("2", "0", "0", "0")));
        assert!(!has_signal(&status("2", "10", "2", "10")), "blocked and ignored");
        assert!(!is_interrupted(std::process::id()));
        assert!(is_interrupted(u32::MAX / 2));
    }
}

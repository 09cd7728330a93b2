//! Choice of the processes to stun: as few as suffice, those that write most first, never an exempt one.
//! Pure.

use whimbrel_guest_protocol::Process;

/// Page writes that may continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Pages that one process may write.
    pub(crate) limit: u32,
    /// Pages that all processes without a stun may write together.
    pub(crate) spare: u32,
}

/// Processes to stun, and exempt ones that would have been stunned.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) stun: Vec<Process>,
    pub(crate) exempt: Vec<Process>,
}

pub(crate) fn choose(
    mut writers: Vec<Process>,
    bounds: Bounds,
    allowed: impl Fn(&Process) -> bool,
) -> Choice {
    writers.sort_by_key(|process| std::cmp::Reverse((process.pages, process.pid)));
    let mut left: u64 = writers.iter().map(|process| u64::from(process.pages)).sum();
    let mut choice = Choice::default();
    for process in writers {
        if process.pages <= bounds.limit || left <= u64::from(bounds.spare) {
            break;
        }
        if allowed(&process) {
            choice.exempt.push(process);
        } else {
            left -= u64::from(process.pages);
            choice.stun.push(process);
        }
    }
    choice
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writers(pages: &[u32]) -> Vec<Process> {
        let of = |(pid, pages): (u32, &u32)| Process { pid, pages: *pages, name: format!("p{pid}") };
        (0..).zip(pages).map(of).collect()
    }

    fn pids(processes: &[Process]) -> Vec<u32> {
        processes.iter().map(|process| process.pid).collect()
    }

    #[test]
    fn the_fastest_are_held_until_the_rest_is_slow_enough() {
        let chosen =
            |spare| choose(writers(&[50, 9000, 41, 700, 40]), Bounds { limit: 40, spare }, |_| false);
        assert_eq!(pids(&chosen(1000).stun), [1]);
        assert_eq!(pids(&chosen(500).stun), [1, 3]);
        assert_eq!(pids(&chosen(0).stun), [1, 3, 0, 2], "never who wrote no more than the limit");
        assert!(chosen(20_000).stun.is_empty(), "slow enough as it is");
    }

    #[test]
    fn who_is_allowed_is_spared_and_named() {
        let bounds = Bounds { limit: 40, spare: 100 };
        let choice = choose(writers(&[9000, 700, 600]), bounds, |process| process.pid == 0);
        assert_eq!((pids(&choice.stun), pids(&choice.exempt)), (vec![1, 2], vec![0]));
    }
}

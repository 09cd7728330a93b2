//! Change batch: which changes of names may be sent at once. Pure.
//!
//! Changes without an answer are sent again, and the server tells from the state of its files whether each
//! was already made. It can do so only if no other change of the same batch altered that state: a file that
//! was renamed and created again under its old name would be renamed once more, over the first. So a batch
//! holds changes of different names only. A change of a name that is in the batch, or in a change already
//! held back, waits for the next batch.

use crate::proto::{Op, RelPath};
use std::collections::HashSet;

#[derive(Default)]
struct AffectedNames {
    names: HashSet<RelPath>,
    /// Every directory above one of the names.
    ancestors: HashSet<RelPath>,
}

impl AffectedNames {
    fn add(&mut self, path: &RelPath) {
        for dir in ancestors(path) {
            // A directory in the set has all directories above it in the set.
            if !self.ancestors.insert(dir) {
                break;
            }
        }
        self.names.insert(path.clone());
    }

    fn has_ancestor_of(&self, path: &RelPath) -> bool {
        ancestors(path).any(|dir| self.names.contains(&dir))
    }
}

fn ancestors(path: &RelPath) -> impl Iterator<Item = RelPath> {
    std::iter::successors(path.split().map(|(dir, _)| dir), |dir| dir.split().map(|(dir, _)| dir))
}

fn names(op: &Op) -> impl Iterator<Item = &RelPath> {
    op.from_path().into_iter().chain([op.path()])
}

/// The changes of `queue`, at most `most`, that may be sent together now, in their order; the others come
/// later.
pub(in crate::client) fn next_batch(
    queue: impl IntoIterator<Item = (u64, Op)>,
    most: usize,
) -> Vec<(u64, Op)> {
    let (mut taken, mut moved, mut held) =
        (AffectedNames::default(), AffectedNames::default(), AffectedNames::default());
    let mut chosen = Vec::new();
    for (number, op) in queue {
        if chosen.len() == most {
            break;
        }
        let renames = op.is_rename();
        let waits = names(&op).any(|path| {
            let repeats = taken.names.contains(path) || moved.has_ancestor_of(path);
            let moves = renames && taken.ancestors.contains(path);
            repeats
                || moves
                || held.names.contains(path)
                || held.ancestors.contains(path)
                || held.has_ancestor_of(path)
        });
        let touched = if waits { &mut held } else { &mut taken };
        names(&op).for_each(|path| touched.add(path));
        if !waits {
            if renames {
                names(&op).for_each(|path| moved.add(path));
            }
            chosen.push((number, op));
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::Time;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn path(text: &str) -> RelPath {
        RelPath::new(text.as_bytes()).unwrap()
    }

    fn create(name: &str, number: i64) -> Op {
        Op::Create { path: path(name), mode: 0o644, stamp: Time { seconds: number, nanos: 0 } }
    }

    fn rename(from: &str, to: &str) -> Op {
        Op::Rename { from: path(from), path: path(to), no_replace: false }
    }

    /// Files by name and stamp; a repeated change is recognised in the way of the server and the caller.
    type Tree = BTreeMap<RelPath, i64>;

    fn make(tree: &mut Tree, op: &Op, again: bool) -> bool {
        match op {
            Op::Create { path, stamp, .. } => match tree.get(path) {
                Some(there) => *there == stamp.seconds,
                None => tree.insert(path.clone(), stamp.seconds).is_none(),
            },
            Op::Rename { from, path, .. } => match tree.remove(from) {
                Some(file) => {
                    tree.insert(path.clone(), file);
                    true
                }
                None => again,
            },
            Op::Unlink { path, .. } => tree.remove(path).is_some() || again,
            _ => false,
        }
    }

    #[test]
    fn a_name_that_is_used_again_waits_and_what_depends_on_it_waits_with_it() {
        let queue = [create("a", 1), rename("a", "b"), create("a", 2), create("c", 3), rename("b", "d")];
        let queue: Vec<_> = (0..).zip(queue).collect();
        let numbers =
            |chosen: Vec<(u64, Op)>| chosen.into_iter().map(|(number, _)| number).collect::<Vec<_>>();
        assert_eq!(numbers(next_batch(queue.clone(), 10)), [0, 3]);
        assert_eq!(numbers(next_batch(queue[1..].to_vec(), 10)), [1, 3]);
        let below = vec![(0, create("dir/a", 1)), (1, rename("dir", "other")), (2, create("other/b", 2))];
        assert_eq!(numbers(next_batch(below, 10)), [0]);
        let dir = vec![(0, Op::Mkdir { path: path("dir"), mode: 0o755 }), (1, create("dir/a", 1))];
        assert_eq!(numbers(next_batch(dir, 10)), [0, 1], "a directory and what is made in it go together");
    }

    proptest! {
        /// The server makes any prefix of each batch, every answer is lost, and the whole batch is sent
        /// again.
        #[test]
        fn changes_whose_answers_were_lost_are_made_once(
            steps in proptest::collection::vec((0usize..3, 0usize..4, 0usize..4), 1..40), cuts in proptest::collection::vec(0usize..6, 1..40)) {
            let name = |number: usize| path(["a", "b", "c", "d"][number]);
            let (mut expected, mut queue) = (Tree::new(), Vec::new());
            for (number, (kind, one, other)) in steps.into_iter().enumerate() {
                let op = match kind {
                    0 => Op::Create { path: name(one), mode: 0, stamp: Time { seconds: number as i64, nanos: 0 } },
                    1 if one != other => Op::Rename { from: name(one), path: name(other), no_replace: false },
                    _ => Op::Unlink { path: name(one), ident: None, keep: false },
                };
                // Only changes that the client would accept are queued.
                if make(&mut expected, &op, false) {
                    queue.push((number as u64, op));
                }
            }
            let mut server = Tree::new();
            let mut cuts = cuts.into_iter().cycle();
            while !queue.is_empty() {
                let sent = next_batch(queue.clone(), 8);
                prop_assert!(!sent.is_empty());
                for (_, op) in sent.iter().take(cuts.next().unwrap_or(0)) {
                    prop_assert!(make(&mut server, op, false));
                }
                for (number, op) in &sent {
                    prop_assert!(make(&mut server, op, true), "{op:?} is refused");
                    queue.retain(|(known, _)| known != number);
                }
            }
            prop_assert_eq!(server, expected);
        }
    }
}

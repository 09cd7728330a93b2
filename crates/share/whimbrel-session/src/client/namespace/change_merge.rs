//! Merging of changes of names that cancel out before they are sent. Pure.
//!
//! Programs write under a temporary name and rename that over the last version, again and again. Sent
//! unmerged, each use of the temporary name would have to wait for the one before (`change_batch.rs`). The
//! final state needs one change for each name: a file that was created, renamed and then replaced by the next
//! one needs none.
//!
//! Only files created by an unsent change are followed. Such a creation is postponed to the place of the
//! rename, which is equivalent as long as no change in between affects either name or moves a directory above
//! one. Any other change of a name leaves earlier changes of that name as they are (`pin`).
//!
//! What the client knew of the file that the server has under a name is the condition of the first change of
//! that name. It stays when that change is merged into a later one, which knows only the first one's result.

use crate::{
    cache::MergedChanges,
    proto::{Known, Op, RelPath},
};
use std::collections::HashMap;

/// Bytes of names that are merged at once, so that the result fits into one journal record.
const MAX_NAME_BYTES: usize = 64 << 10;

/// State of a name after the changes so far, if one change alone determines it.
#[derive(Clone, Copy)]
enum NameState {
    /// The file that this change creates.
    Created(usize),
    /// Nothing, since this change removed whatever was there.
    Removed(usize),
}

struct MergeEntry {
    number: u64,
    /// The change; none if it was dropped.
    op: Option<Op>,
    /// Number of the change that originally created the file which this one creates now.
    created_by: Option<u64>,
    changed: bool,
    /// Condition of the change.
    known: Option<Known>,
}

/// What the server may have under a name that gets a file now.
#[derive(Default)]
struct Replaced {
    /// Whether it may have something.
    may: bool,
    known: Option<Known>,
}

#[derive(Default)]
struct Merge {
    entries: Vec<MergeEntry>,
    names: HashMap<RelPath, NameState>,
    dropped: Vec<u64>,
    creators: Vec<(u64, Option<u64>)>,
}

/// Creates the file of `of` at `path`: replaces what may be there (`over`), or requires that nothing is.
fn creation(of: &Op, path: RelPath, over: bool) -> Option<Op> {
    let (Op::Create { mode, stamp, .. } | Op::Replace { mode, stamp, .. }) = of else { return None };
    let (mode, stamp) = (*mode, *stamp);
    Some(if over { Op::Replace { path, mode, stamp } } else { Op::Create { path, mode, stamp } })
}

fn removal(path: RelPath) -> Op {
    Op::Unlink { path, ident: None, keep: false }
}

impl Merge {
    fn push(
        &mut self,
        number: u64,
        op: Op,
        created_by: Option<u64>,
        changed: bool,
        known: Option<Known>,
    ) -> usize {
        self.entries.push(MergeEntry { number, op: Some(op), created_by, changed, known });
        self.entries.len() - 1
    }

    /// Drops a change; the file that it creates will not exist.
    fn drop_change(&mut self, slot: usize) {
        let slot = &mut self.entries[slot];
        slot.op = None;
        self.dropped.push(slot.number);
        self.creators.extend(slot.created_by.take().map(|born| (born, None)));
    }

    fn replaces(&self, slot: usize) -> bool {
        matches!(self.entries[slot].op, Some(Op::Replace { .. }))
    }

    /// Drops the changes of a name that gets a file now, and returns what the server may have there: without
    /// such changes, what the new one says.
    fn drop_changes_of(&mut self, path: &RelPath, new: Replaced) -> Replaced {
        match self.names.remove(path) {
            Some(NameState::Created(slot)) => {
                let (may, known) = (self.replaces(slot), self.entries[slot].known.take());
                self.drop_change(slot);
                Replaced { may, known }
            }
            Some(NameState::Removed(slot)) => {
                let known = self.entries[slot].known.take();
                self.drop_change(slot);
                Replaced { may: true, known }
            }
            None => new,
        }
    }

    fn add(&mut self, number: u64, op: Op) {
        let born = |fold: &Self, path: &RelPath| match fold.names.get(path) {
            Some(NameState::Created(slot)) => Some(*slot),
            _ => None,
        };
        let (op, known) = op.split();
        match &op {
            Op::Create { path, .. } => self.create(number, &op, path),
            Op::Replace { path, .. } => {
                let over = self.drop_changes_of(path, Replaced { may: true, known });
                let path = path.clone();
                let slot = self.push(number, op, Some(number), false, over.known);
                self.names.insert(path, NameState::Created(slot));
            }
            Op::Rename { from, path, no_replace } if born(self, from).is_some() => {
                let slot = born(self, from).unwrap_or_default();
                self.rename(number, slot, (from, path), Replaced { may: !no_replace, known });
            }
            Op::Unlink { path, ident: None, keep } => self.unlink(number, path, *keep, known),
            Op::SetAttr { path, mode: Some(mode), uid: None, gid: None, mtime: None }
                if born(self, path).is_some() =>
            {
                let slot = born(self, path).unwrap_or_default();
                let slot = &mut self.entries[slot];
                if let Some(Op::Create { mode: kept, .. } | Op::Replace { mode: kept, .. }) = &mut slot.op {
                    *kept = *mode;
                }
                slot.changed = true;
                self.dropped.push(number);
            }
            _ => {
                self.keep_changes_of(&op);
                self.push(number, op, None, false, known);
            }
        }
    }

    fn create(&mut self, number: u64, op: &Op, path: &RelPath) {
        let over = self.drop_changes_of(path, Replaced::default());
        let Some(made) = creation(op, path.clone(), over.may) else { return };
        let slot = self.push(number, made, Some(number), over.may, over.known);
        self.names.insert(path.clone(), NameState::Created(slot));
    }

    fn rename(&mut self, number: u64, slot: usize, (from, to): (&RelPath, &RelPath), new: Replaced) {
        let Some(old) = self.entries[slot].op.take() else { return };
        let born = self.entries[slot].created_by.take();
        if matches!(old, Op::Replace { .. }) {
            // What was there before the file came is removed all the same.
            self.entries[slot].op = Some(removal(from.clone()));
            self.entries[slot].changed = true;
            self.names.insert(from.clone(), NameState::Removed(slot));
        } else {
            self.dropped.push(self.entries[slot].number);
            self.names.remove(from);
        }
        let over = self.drop_changes_of(to, new);
        let Some(made) = creation(&old, to.clone(), over.may) else { return };
        let slot = self.push(number, made, born, true, over.known);
        self.names.insert(to.clone(), NameState::Created(slot));
    }

    fn unlink(&mut self, number: u64, path: &RelPath, keep: bool, known: Option<Known>) {
        let merged = self.names.contains_key(path);
        let over = self.drop_changes_of(path, Replaced { may: true, known });
        if !over.may {
            self.dropped.push(number);
            return;
        }
        // A removed file that is still in use is a file of the server only if no change here created it.
        let keep = keep && !merged;
        let op = Op::Unlink { path: path.clone(), ident: None, keep };
        let slot = self.push(number, op, None, merged, over.known);
        if !keep {
            self.names.insert(path.clone(), NameState::Removed(slot));
        }
    }

    /// A change that cannot be merged: earlier changes of its names stay as they are.
    fn keep_changes_of(&mut self, op: &Op) {
        let moves = matches!(op, Op::Rename { .. } | Op::Rmdir { .. });
        for name in op.from_path().into_iter().chain([op.path()]) {
            self.names.remove(name);
            if moves {
                self.names.retain(|path, _| !path.is_within(name));
            }
        }
    }

    fn finish(mut self) -> MergedChanges {
        let mut now = Vec::new();
        for MergeEntry { number, op, created_by: born, changed, known } in self.entries {
            if let Some(op) = op.filter(|_| changed) {
                now.push((number, op.if_known(known)));
            }
            if let Some(born) = born.filter(|born| *born != number) {
                self.creators.push((born, Some(number)));
            }
        }
        MergedChanges { now, gone: self.dropped, makes: self.creators }
    }
}

/// Bytes of the names of a change, and about those of its condition.
fn size_of_names(op: &Op) -> usize {
    let known = if let Op::If { known, .. } = op { 32 + 12 * known.times.len() } else { 0 };
    op.from_path().map_or(0, |from| from.as_bytes().len()) + op.path().as_bytes().len() + known
}

/// Merges unsent changes, given in order: the result says which are replaced and which are dropped.
pub(in crate::client) fn merge(queue: impl IntoIterator<Item = (u64, Op)>) -> MergedChanges {
    let (mut fold, mut bytes) = (Merge::default(), 0);
    for (number, op) in queue {
        bytes += size_of_names(&op);
        if bytes > MAX_NAME_BYTES {
            break;
        }
        fold.add(number, op);
    }
    fold.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{client::namespace::change_batch::next_batch, proto::Time};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const NAMES: [&str; 9] = ["a", "b", "c", "d", "d/a", "d/b", "e", "e/a", "e/b"];

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Thing {
        File { stamp: i64, mode: u16 },
        Dir,
    }

    /// Files of a server. A repeated change is recognised in the way of the server and the caller.
    type Tree = BTreeMap<RelPath, Thing>;

    fn path(text: &str) -> RelPath {
        RelPath::new(text.as_bytes()).unwrap()
    }

    fn time(seconds: i64) -> Time {
        Time { seconds, nanos: 0 }
    }

    fn has_dir(tree: &Tree, path: &RelPath) -> bool {
        path.split().is_some_and(|(dir, _)| dir.is_root() || tree.get(&dir) == Some(&Thing::Dir))
    }

    fn is_empty(tree: &Tree, dir: &RelPath) -> bool {
        !tree.keys().any(|path| path != dir && path.is_within(dir))
    }

    fn rename(tree: &mut Tree, from: &RelPath, to: &RelPath, no_replace: bool) -> bool {
        let Some(moved) = tree.get(from).copied() else { return false };
        let there = tree.get(to).copied();
        let fits = match (moved, there) {
            (_, Some(_)) if no_replace => false,
            (_, None) | (Thing::File { .. }, Some(Thing::File { .. })) => true,
            (Thing::Dir, Some(Thing::Dir)) => is_empty(tree, to),
            _ => false,
        };
        if from == to || !fits || !has_dir(tree, to) || to.is_within(from) {
            return false;
        }
        let all: Vec<_> =
            tree.iter().filter(|(path, _)| path.is_within(from)).map(|(p, t)| (p.clone(), *t)).collect();
        for (path, thing) in all {
            tree.remove(&path);
            tree.insert(path.moved(from, to).unwrap(), thing);
        }
        true
    }

    fn make(tree: &mut Tree, op: &Op, again: bool) -> bool {
        match op {
            Op::Create { path, stamp, mode } | Op::Replace { path, stamp, mode } => {
                let over = matches!(op, Op::Replace { .. });
                let new = Thing::File { stamp: stamp.seconds, mode: *mode };
                match tree.get(path) {
                    Some(Thing::File { stamp: known, .. }) if *known == stamp.seconds => again,
                    Some(Thing::File { .. }) if over => tree.insert(path.clone(), new).is_some(),
                    Some(_) => false,
                    None => has_dir(tree, path) && tree.insert(path.clone(), new).is_none(),
                }
            }
            Op::Mkdir { path, .. } => match tree.get(path) {
                Some(Thing::Dir) => again,
                Some(_) => false,
                None => has_dir(tree, path) && tree.insert(path.clone(), Thing::Dir).is_none(),
            },
            Op::Rmdir { path } => match tree.get(path) {
                Some(Thing::Dir) => is_empty(tree, path) && tree.remove(path).is_some(),
                Some(_) => false,
                None => again,
            },
            Op::Unlink { path, ident, .. } => match tree.get(path) {
                Some(Thing::File { .. }) => tree.remove(path).is_some(),
                Some(_) => false,
                None => again || ident.is_none(),
            },
            Op::Rename { from, path, no_replace } => {
                rename(tree, from, path, *no_replace) || again && !tree.contains_key(from)
            }
            Op::SetAttr { path, mode, .. } => match tree.get_mut(path) {
                Some(Thing::File { mode: known, .. }) => {
                    *known = mode.unwrap_or(*known);
                    true
                }
                _ => false,
            },
            _ => false,
        }
    }

    type Step = (usize, usize, usize);

    fn op_of(number: i64, (kind, one, other): Step) -> Op {
        let (path, other) = (path(NAMES[one]), path(NAMES[other]));
        match kind {
            0..4 => Op::Create { path, mode: 0o644, stamp: time(number) },
            4..9 => Op::Rename { from: path, path: other, no_replace: kind == 4 },
            9..11 => Op::Unlink { path, ident: None, keep: kind == 9 },
            11 => Op::Mkdir { path, mode: 0o755 },
            12 => Op::Rmdir { path },
            _ => Op::SetAttr {
                path,
                mode: Some(other.as_bytes().len() as u16),
                uid: None,
                gid: None,
                mtime: None,
            },
        }
    }

    /// Server before, changes that the client accepts, and server after.
    fn queued(steps: Vec<Step>) -> (Tree, Vec<(u64, Op)>, Tree) {
        let old = |stamp| Thing::File { stamp, mode: 0o600 };
        let server = Tree::from([
            (path("a"), old(-1)),
            (path("b"), old(-2)),
            (path("d"), Thing::Dir),
            (path("d/a"), old(-3)),
        ]);
        let (mut expected, mut queue) = (server.clone(), Vec::new());
        for (number, step) in (0..).zip(steps) {
            let op = op_of(number, step);
            let there = !matches!(op, Op::Unlink { .. }) || expected.contains_key(op.path());
            if there && make(&mut expected, &op, false) {
                queue.push((number as u64, op));
            }
        }
        (server, queue, expected)
    }

    fn apply(queue: &mut Vec<(u64, Op)>, folded: &MergedChanges) {
        let mut all: BTreeMap<u64, Op> =
            queue.drain(..).filter(|(number, _)| !folded.gone.contains(number)).collect();
        all.extend(folded.now.iter().cloned());
        queue.extend(all);
    }

    /// The change that now creates a file that `number` was to create; inner `None` if no change does, outer
    /// `None` if nothing changed.
    fn creator_of(merged: &MergedChanges, number: u64) -> Option<Option<u64>> {
        merged.makes.iter().find(|(before, _)| *before == number).map(|(_, now)| *now)
    }

    #[test]
    fn a_file_replaced_a_thousand_times_by_way_of_one_temporary_name_is_made_once() {
        let mut queue = Vec::new();
        for number in (0..3000).step_by(3) {
            let to = path(["a", "b", "c"][number as usize / 3 % 3]);
            queue.push((number, Op::Create { path: path("tmp"), mode: 0o600, stamp: time(number as i64) }));
            queue.push((
                number + 1,
                Op::SetAttr { path: path("tmp"), mode: Some(0o644), uid: None, gid: None, mtime: None },
            ));
            queue.push((number + 2, Op::Rename { from: path("tmp"), path: to, no_replace: false }));
        }
        let folded = merge(queue.clone());
        assert_eq!(creator_of(&folded, 2997), Some(Some(2999)));
        assert_eq!(creator_of(&folded, 0), Some(None));
        apply(&mut queue, &folded);
        let replaced = |number: u64, name| {
            (number, Op::Replace { path: path(name), mode: 0o644, stamp: time(number as i64 - 2) })
        };
        assert_eq!(queue, [replaced(2993, "b"), replaced(2996, "c"), replaced(2999, "a")]);
        assert_eq!(next_batch(queue, 512).len(), 3);
    }

    #[test]
    fn a_merged_change_keeps_the_condition_of_the_first_one_of_its_name() {
        let known = |seconds| Known { ident: None, times: vec![time(seconds)] };
        let create = |name: &str, stamp| Op::Create { path: path(name), mode: 0o600, stamp: time(stamp) };
        let over = |from: &str, to: &str, what| {
            let rename = Op::Rename { from: path(from), path: path(to), no_replace: false };
            rename.if_known(Some(known(what)))
        };
        // The server has a version of time 50. The second save replaces what the first one made.
        let saves = [create("tmp", 1), over("tmp", "a", 50), create("tmp", 2), over("tmp", "a", 1)];
        let mut queue: Vec<_> = (0..).zip(saves.clone()).collect();
        let merged = merge(queue.clone());
        apply(&mut queue, &merged);
        let replaced = |name: &str, stamp| Op::Replace { path: path(name), mode: 0o600, stamp: time(stamp) };
        assert_eq!(queue, [(3, replaced("a", 2).if_known(Some(known(50))))]);
        // What is there is removed when the new file goes on, or is removed itself.
        let removed = removal(path("a")).if_known(Some(known(50)));
        for (last, expected) in [
            (
                Op::Rename { from: path("a"), path: path("b"), no_replace: true },
                vec![removed.clone(), create("b", 1)],
            ),
            (removal(path("a")).if_known(Some(known(1))), vec![removed.clone()]),
        ] {
            let mut queue: Vec<_> = (0..).zip(saves[..2].iter().cloned().chain([last])).collect();
            let merged = merge(queue.clone());
            apply(&mut queue, &merged);
            assert_eq!(queue.into_iter().map(|(_, op)| op).collect::<Vec<_>>(), expected);
        }
    }

    fn steps(most: usize) -> impl Strategy<Value = Vec<Step>> {
        proptest::collection::vec((0usize..14, 0..NAMES.len(), 0..NAMES.len()), 1..most)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn what_was_folded_comes_to_the_same(steps in steps(60)) {
            let (mut server, mut queue, expected) = queued(steps);
            let before = queue.clone();
            let folded = merge(queue.clone());
            apply(&mut queue, &folded);
            for (_, op) in &queue {
                prop_assert!(make(&mut server, op, false), "{op:?} is refused, of {before:?} as {queue:?}");
            }
            prop_assert_eq!(&server, &expected);
            prop_assert!(merge(queue.clone()).gone.is_empty(), "what is folded once is folded");
            // Each file is created by the change in its record, or by none.
            for (number, op) in &before {
                let Op::Create { stamp, .. } = op else { continue };
                let by = creator_of(&folded, *number).unwrap_or(Some(*number));
                let makes = |(_, op): &&(u64, Op)| matches!(op, Op::Create { stamp: made, .. } | Op::Replace { stamp: made, .. } if made == stamp);
                prop_assert_eq!(queue.iter().find(makes).map(|(number, _)| *number), by);
            }
        }

        /// Changes arrive while others are sent; the server makes some of a batch, answers are lost, and the
        /// client crashes and knows only its journal.
        #[test]
        fn no_cut_has_a_change_made_twice_or_not_at_all(
            steps in steps(60), rounds in proptest::collection::vec((0usize..12, 0usize..9, 0usize..9, any::<bool>()), 1..40)) {
            let (mut server, all, expected) = queued(steps);
            let (mut coming, mut queue, mut sent) = (all.into_iter(), Vec::new(), 0);
            let mut again = std::collections::HashSet::new();
            let mut rounds = rounds.into_iter();
            loop {
                let (come, made, answered, folds) = rounds.next().unwrap_or((12, 8, 8, true));
                queue.extend(coming.by_ref().take(come + 1));
                if queue.is_empty() {
                    break;
                }
                if folds {
                    let folded = merge(queue.iter().filter(|(number, _)| *number >= sent).cloned());
                    apply(&mut queue, &folded);
                }
                let chosen = next_batch(queue.clone(), 8);
                sent = chosen.iter().map(|(number, _)| number + 1).max().unwrap_or(sent).max(sent);
                for (place, (number, op)) in chosen.iter().enumerate().take(made) {
                    let may = again.contains(number);
                    prop_assert!(make(&mut server, op, may), "{op:?} is refused");
                    if place < answered {
                        queue.retain(|(known, _)| known != number);
                    }
                }
                again.extend(chosen.iter().map(|(number, _)| *number));
            }
            prop_assert_eq!(server, expected);
        }
    }
}

//! The graph beside `log --graph`: which capsule follows which, one column a line of descent.
//!
//! Pure text. Capsules come newest first, each before its parents. A column waits for one capsule; drawing it
//! replaces it by its parents. Columns are never reordered, so a line of descent stays where it is.

use whimbrel_core::CapsuleId;

/// The columns that are open between two rows.
#[derive(Debug, Default)]
pub(crate) struct Graph {
    columns: Vec<CapsuleId>,
}

impl Graph {
    /// The lines to print before the text of `capsule`: first those that only join columns, last its own.
    pub(crate) fn row(&mut self, capsule: CapsuleId, parents: &[CapsuleId]) -> Vec<String> {
        let at = self.columns.iter().position(|waiting| *waiting == capsule).unwrap_or_else(|| {
            self.columns.push(capsule);
            self.columns.len() - 1
        });
        let mut lines = self.join(capsule, at);
        lines.push(self.draw(|column| if column == at { '*' } else { '|' }));
        self.columns.splice(at..=at, parents.iter().copied());
        lines
    }

    /// Ends every further column that waits for `capsule`: its line of descent meets the one at `at`.
    fn join(&mut self, capsule: CapsuleId, at: usize) -> Vec<String> {
        let mut lines = Vec::new();
        while let Some(twin) = self.columns.iter().skip(at + 1).position(|waiting| *waiting == capsule) {
            let twin = at + 1 + twin;
            lines.push(self.draw(|column| if column == twin { '/' } else { '|' }));
            self.columns.remove(twin);
        }
        lines
    }

    fn draw(&self, mark: impl Fn(usize) -> char) -> String {
        (0..self.columns.len()).flat_map(|column| [mark(column), ' ']).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::Digest;

    fn id(name: &str) -> CapsuleId {
        CapsuleId(Digest::of(name.as_bytes()))
    }

    fn draw(history: &[(&str, &[&str])]) -> String {
        let mut graph = Graph::default();
        let rows = history.iter().map(|(name, parents)| {
            let parents: Vec<_> = parents.iter().map(|parent| id(parent)).collect();
            graph.row(id(name), &parents).join("\n") + name
        });
        rows.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn one_line_of_descent_is_one_column() {
        assert_eq!(draw(&[("c", &["b"]), ("b", &["a"]), ("a", &[])]), "* c\n* b\n* a");
    }

    #[test]
    fn two_machines_from_one_capsule_meet_in_it() {
        let picture = draw(&[("x", &["base"]), ("y", &["base"]), ("base", &["a"]), ("a", &[])]);
        assert_eq!(picture, "* x\n| * y\n| / \n* base\n* a");
    }

    #[test]
    fn a_capsule_with_two_parents_opens_a_column() {
        assert_eq!(draw(&[("m", &["a", "b"]), ("a", &[]), ("b", &[])]), "* m\n* | a\n* b");
    }
}

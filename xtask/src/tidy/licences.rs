//! Every package in the product may be shipped under Apache-2.0 OR MIT.
//!
//! A licence expression is read as SPDX 2.3 annex D defines it (`AND`, `OR`, `WITH`, parentheses; `AND` binds
//! tighter), plus the `/` that old manifests use for `OR`. It fits if it can be satisfied with licences of
//! [`ALLOWED`] alone. What cannot be read does not fit.

use super::Finding;
use super::metadata::Graph;

const RULE: &str = "licences";

/// Licences whose terms ask no more than attribution.
const ALLOWED: &[&str] = &[
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "MIT",
    "MIT-0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Zlib",
    "0BSD",
    "CC0-1.0",
    "Unlicense",
    // xxhash-rust. Asks for nothing in binaries.
    "BSL-1.0",
    // The Unicode tables inside several crates.
    "Unicode-3.0",
    // Root certificates as data.
    "CDLA-Permissive-2.0",
];

/// Every package that does not fit.
pub(crate) fn check(graph: &Graph) -> Vec<Finding> {
    let misfits = graph.packages.iter().filter(|package| !package.license.as_deref().is_some_and(fits));
    misfits
        .map(|package| {
            let (name, version) = (&package.name, &package.version);
            let licence = package.license.as_deref().unwrap_or("no licence named");
            let text = format!(
                "{name} {version} ({licence}): choose another package, or argue for it in {}",
                file!()
            );
            Finding::violation("Cargo.lock", 0, RULE, text)
        })
        .collect()
}

/// Whether `expression` can be satisfied with allowed licences alone.
fn fits(expression: &str) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut parser = Parser { words: spaced.split_whitespace().collect(), at: 0 };
    let verdict = parser.any();
    verdict == Some(true) && parser.at == parser.words.len()
}

/// Recursive descent; each function returns whether its part is satisfied, or `None` if it cannot be read.
struct Parser<'a> {
    words: Vec<&'a str>,
    at: usize,
}

impl<'a> Parser<'a> {
    fn accept(&mut self, word: &str) -> bool {
        let found = self.words.get(self.at).is_some_and(|next| next.eq_ignore_ascii_case(word));
        self.at += usize::from(found);
        found
    }

    fn any(&mut self) -> Option<bool> {
        let mut satisfied = self.all()?;
        while self.accept("OR") {
            satisfied |= self.all()?;
        }
        Some(satisfied)
    }

    fn all(&mut self) -> Option<bool> {
        let mut satisfied = self.one()?;
        while self.accept("AND") {
            satisfied &= self.one()?;
        }
        Some(satisfied)
    }

    fn one(&mut self) -> Option<bool> {
        if self.accept("(") {
            let satisfied = self.any()?;
            return self.accept(")").then_some(satisfied);
        }
        let licence = self.name()?;
        if self.accept("WITH") {
            let exception = self.name()?;
            return Some(ALLOWED.contains(&format!("{licence} WITH {exception}").as_str()));
        }
        Some(ALLOWED.contains(&licence))
    }

    fn name(&mut self) -> Option<&'a str> {
        let word = *self.words.get(self.at)?;
        if ["OR", "AND", "WITH", "(", ")"].contains(&word) {
            return None;
        }
        self.at += 1;
        Some(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn and_binds_tighter_than_or() {
        assert!(fits("MIT OR GPL-2.0 AND GPL-3.0"));
        assert!(!fits("(MIT OR Apache-2.0) AND GPL-3.0"));
        assert!(fits("(MIT OR GPL-2.0) AND (ISC OR MPL-2.0)"));
    }

    #[test]
    fn a_copyleft_licence_passes_only_as_an_alternative() {
        assert!(!fits("GPL-2.0-or-later"));
        assert!(!fits("AGPL-3.0-only"));
        assert!(fits("LGPL-2.1-or-later OR MIT"));
        assert!(!fits("MPL-2.0"));
    }

    #[test]
    fn exceptions_belong_to_their_licence() {
        assert!(fits("Apache-2.0 WITH LLVM-exception OR Apache-2.0"));
        assert!(!fits("GPL-2.0 WITH Classpath-exception-2.0"));
        assert!(!fits("MIT WITH LLVM-exception"));
    }

    #[test]
    fn what_cannot_be_read_does_not_fit() {
        for bad in ["", "MIT OR", "OR MIT", "(MIT", "MIT)", "MIT Apache-2.0", "MIT AND AND ISC", "WITH"] {
            assert!(!fits(bad), "{bad:?}");
        }
    }

    #[test]
    fn the_old_slash_is_an_or() {
        assert!(fits("MIT/Apache-2.0"));
        assert!(fits("GPL-3.0/MIT"));
    }
}

//! Rule: what a caller was told to be durable is there until its owner removes it. What was begun and not
//! answered may be there or not, but nothing else.

use std::{collections::BTreeMap, fmt::Debug};

/// What each name had when it was last acknowledged, and what was begun since.
#[derive(Debug)]
pub(crate) struct Ledger<T> {
    acknowledged: BTreeMap<String, Option<T>>,
    begun: BTreeMap<String, Vec<Option<T>>>,
}

impl<T> Default for Ledger<T> {
    fn default() -> Self {
        Self { acknowledged: BTreeMap::new(), begun: BTreeMap::new() }
    }
}

impl<T: Clone + PartialEq + Debug> Ledger<T> {
    /// A change of `name` to `value` begins; none removes it.
    pub(crate) fn begin(&mut self, name: &str, value: Option<T>) {
        self.begun.entry(name.to_owned()).or_default().push(value);
    }

    /// Only the last change of `name` that was begun was answered; it is durable.
    pub(crate) fn acknowledge(&mut self, name: &str, value: Option<T>) {
        self.acknowledged.insert(name.to_owned(), value);
        self.begun.remove(name);
    }

    /// Names that were ever used.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.acknowledged.keys().chain(self.begun.keys()).cloned().collect();
        names.sort();
        names.dedup();
        names
    }

    /// Whether `found` is what was acknowledged of `name`, or begun since. What was seen once is
    /// acknowledged from then on.
    pub(crate) fn see(&mut self, name: &str, found: Option<T>) -> Result<(), String> {
        let last = self.acknowledged.get(name).cloned().flatten();
        let begun = self.begun.get(name);
        if found != last && !begun.is_some_and(|begun| begun.contains(&found)) {
            let begun = begun.map_or(0, Vec::len);
            return Err(format!(
                "{name} has {found:?}, but {last:?} was acknowledged and {begun} changes were begun since"
            ));
        }
        self.acknowledge(name, found);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_acknowledged_and_the_begun_may_be_found() {
        let mut ledger = Ledger::default();
        ledger.begin("a", Some(1));
        assert_eq!(ledger.see("a", None), Ok(()), "it was not answered");
        ledger.acknowledge("a", Some(1));
        ledger.begin("a", Some(2));
        assert!(ledger.see("a", Some(3)).is_err());
        assert!(ledger.see("a", None).is_err());
        assert_eq!(ledger.see("a", Some(2)), Ok(()));
        assert!(ledger.see("a", Some(1)).is_err(), "what was seen does not go back");
        ledger.begin("a", None);
        assert_eq!(ledger.see("a", None), Ok(()));
    }
}

//! Tree of `log --graph`: each capsule below its parent, drawn as text.
//!
//! Nodes come parents first. A line of descent stays in its column; where it forks, the branches are indented
//! by one step. A capsule with several parents is drawn below the first. There is no recursion, because a
//! line may be long.

use std::collections::{HashMap, HashSet};
use whimbrel_api::GraphNode;
use whimbrel_core::CapsuleId;

/// Node to draw, with the prefix of its line and the prefix of the lines below it.
struct Step {
    id: CapsuleId,
    before: String,
    below: String,
}

/// Draws all trees with an empty line between them. `text` is the description of a node.
pub(crate) fn draw(nodes: &[GraphNode], text: impl Fn(&GraphNode) -> String) -> String {
    let by_id: HashMap<CapsuleId, &GraphNode> = nodes.iter().map(|node| (node.capsule.id, node)).collect();
    let (roots, children) = forest(nodes, &by_id);
    let mut trees = Vec::new();
    let mut drawn = HashSet::new();
    for root in roots {
        let (mut lines, mut open) =
            (String::new(), vec![Step { id: root, before: String::new(), below: String::new() }]);
        while let Some(step) = open.pop() {
            let Some(node) = by_id.get(&step.id).filter(|_| drawn.insert(step.id)) else { continue };
            let mark = if node.capsule.active { '●' } else { '○' };
            lines += &format!("{}{mark} {}\n", step.before, text(node));
            let children = children.get(&step.id).map_or(&[][..], Vec::as_slice);
            open.extend(branches(children, &step.below));
        }
        trees.push(lines);
    }
    trees.join("\n")
}

/// Finds the roots, and the children of each node.
fn forest(
    nodes: &[GraphNode],
    by_id: &HashMap<CapsuleId, &GraphNode>,
) -> (Vec<CapsuleId>, HashMap<CapsuleId, Vec<CapsuleId>>) {
    let (mut roots, mut children) = (Vec::new(), HashMap::<CapsuleId, Vec<CapsuleId>>::new());
    for node in nodes {
        match node.under.iter().find(|parent| by_id.contains_key(parent)) {
            Some(parent) => children.entry(*parent).or_default().push(node.capsule.id),
            None => roots.push(node.capsule.id),
        }
    }
    (roots, children)
}

/// Steps to the children of a node, in reverse order for the stack.
fn branches(children: &[CapsuleId], below: &str) -> Vec<Step> {
    if let [only] = children {
        return vec![Step { id: *only, before: below.to_owned(), below: below.to_owned() }];
    }
    let step = |(at, id): (usize, &CapsuleId)| {
        let (corner, line) = if at + 1 == children.len() { ("└─", "  ") } else { ("├─", "│ ") };
        Step { id: *id, before: format!("{below}{corner}"), below: format!("{below}{line}") }
    };
    children.iter().enumerate().map(step).rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::Digest;

    fn id(name: &str) -> CapsuleId {
        CapsuleId(Digest::of(name.as_bytes()))
    }

    fn node(name: &str, under: &[&str]) -> GraphNode {
        let under: Vec<_> = under.iter().map(|name| id(name)).collect();
        let node = serde_json::json!({
            "id": id(name), "names": [], "machine": name, "active": !name.starts_with("disk"), "time_ms": 1,
            "host": "alpha", "memory": 1, "images": [], "parents": [], "labels": {},
            "adds": null, "under": under, "children": [], "machines": [],
        });
        serde_json::from_value(node).unwrap()
    }

    fn picture(nodes: &[GraphNode]) -> String {
        draw(nodes, |node| node.capsule.machine.to_string())
    }

    #[test]
    fn one_line_of_descent_is_one_column() {
        let line = [node("disk", &[]), node("a", &["disk"]), node("b", &["a"])];
        assert_eq!(picture(&line), "○ disk\n● a\n● b\n");
    }

    #[test]
    fn branches_are_set_in_and_their_lines_go_on_below_them() {
        let forked = [
            node("disk", &[]),
            node("x", &["disk"]),
            node("x2", &["x"]),
            node("x3", &["x2"]),
            node("x4", &["x2"]),
            node("y", &["disk"]),
            node("y2", &["y"]),
        ];
        let wanted = "○ disk\n├─● x\n│ ● x2\n│ ├─● x3\n│ └─● x4\n└─● y\n  ● y2\n";
        assert_eq!(picture(&forked), wanted);
    }

    #[test]
    fn trees_are_parted_and_a_parent_that_is_not_here_makes_a_root() {
        assert_eq!(picture(&[node("a", &[]), node("b", &["gone"])]), "● a\n\n● b\n");
        assert_eq!(picture(&[]), "");
    }

    #[test]
    fn two_parents_draw_a_capsule_once_and_a_circle_ends() {
        let merged = [node("a", &[]), node("b", &["a"]), node("c", &["a"]), node("m", &["b", "c"])];
        assert_eq!(picture(&merged), "● a\n├─● b\n│ ● m\n└─● c\n");
        assert_eq!(picture(&[node("a", &["b"]), node("b", &["a"])]), "");
    }

    #[test]
    fn a_line_may_be_long() {
        let name = |number: u32| format!("c{number}");
        let line: Vec<_> = (0..20_000u32)
            .map(|number| {
                node(
                    &name(number),
                    &number.checked_sub(1).map(name).iter().map(String::as_str).collect::<Vec<_>>(),
                )
            })
            .collect();
        assert_eq!(picture(&line).lines().count(), 20_000);
    }
}

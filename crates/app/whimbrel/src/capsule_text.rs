//! Text about capsules: tables, the details of one, the differences of two.

use crate::table::{ago, fields, table};
use whimbrel_api::{CapsuleDiff, CapsuleInfo, PreviousCapsule};
use whimbrel_core::{ByteSize, MachineName, PAGE_SIZE, RefName};

pub(crate) fn list(capsules: &[CapsuleInfo]) -> String {
    let rows = capsules.iter().map(|capsule| {
        [
            capsule.id.short(),
            names(capsule),
            capsule.machine.to_string(),
            kind_here(capsule),
            capsule.memory.to_string(),
            capsule.host.to_string(),
            ago(capsule.time_ms),
        ]
    });
    let header = ["ID", "NAMES", "MACHINE", "KIND", "MEMORY", "HOST", "AGE"];
    table(header, rows, "no capsules; take one with `whimbrel checkpoint NAME`")
}

/// Joins the names of a capsule, like `before-upgrade, web`.
pub(crate) fn names(capsule: &CapsuleInfo) -> String {
    capsule.names.iter().map(RefName::as_str).collect::<Vec<_>>().join(", ")
}

/// Tells a capsule with memory, which resumes, from a disk-only one, which boots.
pub(crate) fn kind(capsule: &CapsuleInfo) -> &'static str {
    if capsule.active { "with memory" } else { "disk-only" }
}

fn kind_here(capsule: &CapsuleInfo) -> String {
    let here = if capsule.whole { "" } else { ", partial" };
    format!("{}{here}", kind(capsule))
}

pub(crate) fn page(capsule: &CapsuleInfo) -> String {
    let parents: Vec<_> = capsule.parents.iter().map(|parent| parent.short()).collect();
    let mut pairs = vec![
        ("capsule", capsule.id.to_string()),
        ("names", names(capsule)),
        ("machine", capsule.machine.to_string()),
        ("kind", kind_here(capsule)),
        ("taken on", format!("{}, {} ago", capsule.host, ago(capsule.time_ms))),
        ("memory", capsule.memory.to_string()),
        ("parents", parents.join(", ")),
    ];
    pairs.extend(capsule.labels.iter().map(|(key, value)| ("label", format!("{key}={value}"))));
    let images =
        capsule.images.iter().map(|image| [image.name.clone(), image.size.to_string(), image.root.short()]);
    format!("{}\n{}", fields(&pairs), table(["IMAGE", "SIZE", "ROOT"], images, "no images"))
}

/// Remark about a capsule that lost a name; none if it has no children.
pub(crate) fn left_behind(left: &PreviousCapsule) -> Option<String> {
    let machines: Vec<_> = left.machines.iter().map(MachineName::as_str).collect();
    if !machines.is_empty() {
        return Some(format!("{} needs that capsule, so `whimbrel gc` retains it", machines.join(", ")));
    }
    let children = match left.children.len() as u64 {
        0 => return None,
        1 => "1 child, which does not depend on it".to_owned(),
        more => format!("{more} children, which do not depend on it"),
    };
    let names: Vec<_> = left.names.iter().map(RefName::as_str).collect();
    let now = match names.is_empty() {
        true => "the next `whimbrel gc` deletes it".to_owned(),
        false => format!("it still has the name {}", names.join(", ")),
    };
    Some(format!("that capsule has {children}; {now}"))
}

pub(crate) fn difference(diff: &CapsuleDiff) -> String {
    let images = diff.images.iter().map(|image| {
        let pages = image.pages_a.max(image.pages_b);
        [image.name.clone(), size(pages), size(image.changed), size(image.new_contents)]
    });
    let mut text = table(["IMAGE", "SIZE", "CHANGED", "NEW"], images, "no images");
    for change in &diff.config {
        let value = |side: &Option<String>| side.clone().unwrap_or_else(|| "-".to_owned());
        text += &format!("{}: {} -> {}\n", change.field, value(&change.a), value(&change.b));
    }
    text
}

fn size(pages: u64) -> String {
    ByteSize(pages.saturating_mul(PAGE_SIZE as u64)).to_string()
}

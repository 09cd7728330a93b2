//! Layers that add, replace, remove and hide, and layers that try to leave the tree.

use super::*;
use crate::image::sha256;
use std::{io::Cursor, os::unix::fs::symlink, process::Command};
use tar::{Builder, Header};

/// A layer that is being written.
struct LayerFile(Builder<Vec<u8>>);

impl LayerFile {
    fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    fn header(kind: EntryType, mode: u32, owner: u64, size: usize) -> Header {
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(owner);
        header.set_gid(owner + 1);
        header.set_mtime(1_000_000_000);
        header.set_size(size as u64);
        header
    }

    /// Writes a name that a builder would refuse.
    fn raw(mut self, name: &str, mut header: Header, content: &[u8]) -> Self {
        let field = &mut header.as_old_mut().name;
        field[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        self.0.append(&header, content).unwrap();
        self
    }

    fn file(self, name: &str, content: &[u8]) -> Self {
        self.raw(name, Self::header(EntryType::Regular, 0o640, 10, content.len()), content)
    }

    fn folder(self, name: &str) -> Self {
        self.raw(name, Self::header(EntryType::Directory, 0o750, 20, 0), &[])
    }

    fn link(mut self, kind: EntryType, name: &str, target: &str) -> Self {
        let mut header = Self::header(kind, 0o777, 30, 0);
        self.0.append_link(&mut header, name, target).unwrap();
        self
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

struct Unpacked(tempfile::TempDir);

impl Unpacked {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, path: &str) -> std::path::PathBuf {
        self.0.path().join(TREE).join(path)
    }

    fn try_apply(&self, layer: &[u8], packed: &[u8], bytes: u64) -> Result<Applied, ContainerError> {
        let limits = LayerLimits { length: packed.len() as u64, bytes, diff_id: sha256(layer) };
        apply_layer(self.0.path(), Cursor::new(packed), &limits)
    }

    fn apply(&self, layer: LayerFile) -> Applied {
        let layer = layer.bytes();
        self.try_apply(&layer, &layer, 1 << 20).unwrap()
    }

    fn refusal(&self, layer: LayerFile) -> String {
        let layer = layer.bytes();
        self.try_apply(&layer, &layer, 1 << 20).unwrap_err().to_string()
    }

    /// Names of all that is in the tree, as find(1) lists them.
    fn names(&self) -> Vec<String> {
        let found = Command::new("find").arg(".").current_dir(self.path("")).output().unwrap();
        let text = String::from_utf8(found.stdout).unwrap();
        let mut names: Vec<_> =
            text.lines().filter_map(|name| name.strip_prefix("./")).map(str::to_owned).collect();
        names.sort();
        names
    }

    fn commands(&self) -> String {
        fs::read_to_string(self.0.path().join(COMMANDS)).unwrap()
    }
}

#[test]
fn an_upper_layer_replaces_removes_and_hides_what_lower_ones_have() {
    let place = Unpacked::new();
    let lower = LayerFile::new().folder("./etc/").file("etc/a", b"1").file("etc/b", b"1").folder("data");
    let lower = lower.file("data/old", b"1").folder("data/sub").file("data/sub/old", b"1").folder("gone");
    let lower = lower.file("gone/x", b"1").file("kind", b"1").link(EntryType::Symlink, "lib", "/usr/lib");
    let applied = place.apply(lower.folder("usr").folder("usr/lib").link(EntryType::Link, "etc/c", "etc/a"));
    assert_eq!((applied.bytes, applied.left_out), (6, 0));

    let upper = LayerFile::new().file("etc/a", b"22").file("etc/.wh.b", b"").file(".wh.gone", b"");
    // What hides the folder comes after a part of what the layer itself has in it.
    let upper = upper
        .folder("data/sub")
        .file("data/sub/new", b"2")
        .file("data/.wh..wh..opq", b"")
        .file("data/new", b"2");
    let upper = upper.folder("kind").file("kind/now", b"2").file("lib/so", b"2");
    let applied = place.apply(upper);
    let expected = [
        "data",
        "data/new",
        "data/sub",
        "data/sub/new",
        "etc",
        "etc/a",
        "etc/c",
        "kind",
        "kind/now",
        "lib",
        "usr",
        "usr/lib",
        "usr/lib/so",
    ];
    assert_eq!(place.names(), expected);
    assert_eq!(applied.files, expected.len() as u64, "{}", place.commands());
    // The other name of a file that was replaced keeps the old content.
    assert_eq!(fs::read(place.path("etc/a")).unwrap(), b"22");
    assert_eq!(fs::read(place.path("etc/c")).unwrap(), b"1");
}

#[test]
fn owners_and_modes_are_commands_and_not_those_of_the_tree() {
    let place = Unpacked::new();
    let mut special = LayerFile::header(EntryType::Regular, 0o4755, 2_000_000, 1);
    special.set_gid(5);
    let layer = LayerFile::new().raw("bin/su", special, b"x").folder("etc").file("etc/shadow", b"x");
    let device = LayerFile::header(EntryType::Char, 0o600, 0, 0);
    let fifo = LayerFile::header(EntryType::Fifo, 0o600, 0, 0);
    let applied = place.apply(layer.raw("dev/mem", device, &[]).raw("fifo", fifo, &[]));
    assert_eq!(applied.left_out, 1);
    let commands = place.commands();
    let has = |line: &str| assert!(commands.lines().any(|found| found == line), "{line} in {commands}");
    for line in
        ["\"/\" mode 040755", "\"/bin\" mode 040755", "\"/bin/su\" mode 0104755", "\"/bin/su\" uid 2000000"]
    {
        has(&format!("sif {line}"));
    }
    for line in [
        "\"/bin/su\" gid 5",
        "\"/etc/shadow\" mode 0100640",
        "\"/etc\" uid 20",
        "\"/etc\" gid 21",
        "\"/fifo\" mode 010600",
    ] {
        has(&format!("sif {line}"));
    }
    use std::os::unix::fs::MetadataExt;
    let file = fs::metadata(place.path("bin/su")).unwrap();
    assert_eq!((file.mode() & 0o7777, file.mtime()), (0o600, 1_000_000_000));
}

#[test]
fn capabilities_of_files_are_kept() {
    let place = Unpacked::new();
    let mut layer = LayerFile::new();
    layer
        .0
        .append_pax_extensions([(CAPABILITY, &b"\x01\0\0\x02\0\x04"[..]), ("SCHILY.xattr.user.x", b"y")])
        .unwrap();
    place.apply(layer.file("ping", b"x"));
    assert!(place.commands().contains("ea_set -f capability-0 \"/ping\" security.capability\n"));
    assert_eq!(fs::read(place.0.path().join("capability-0")).unwrap(), b"\x01\0\0\x02\0\x04");
}

#[test]
fn no_layer_leaves_the_tree() {
    let place = Unpacked::new();
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret"), "secret").unwrap();
    let refused = |layer: LayerFile, why: &str| {
        let refusal = place.refusal(layer);
        assert!(refusal.contains(why), "{refusal}");
    };
    refused(LayerFile::new().file("../x", b"x"), "leads out of the layer");
    refused(LayerFile::new().file("a/../../x", b"x"), "leads out of the layer");
    refused(LayerFile::new().file("a\nquit", b"x"), "line break");
    for mark in [".wh.", "a/.wh..", "/a/.wh..."] {
        refused(LayerFile::new().file(mark, b""), "removes no file");
    }
    refused(
        LayerFile::new().file(&"a/".repeat(49), b"x").link(EntryType::Link, "b", "../secret"),
        "leads out",
    );
    let away = outside.path().to_str().unwrap();
    let through = LayerFile::new().link(EntryType::Symlink, "out", away).file("out/secret", b"changed");
    refused(through, "cannot be where the layer puts it");
    let hard =
        LayerFile::new().link(EntryType::Symlink, "out2", away).link(EntryType::Link, "mine", "out2/secret");
    refused(hard, "cannot be where the layer puts it");
    let removed = LayerFile::new().link(EntryType::Symlink, "out3", away).file("out3/.wh.secret", b"");
    refused(removed, "cannot be where the layer puts it");
    // A link that somebody made in the tree beside the layers is no way out either.
    symlink(away, place.path("planted")).unwrap();
    refused(LayerFile::new().file("planted/secret", b"changed"), "cannot be where the layer puts it");
    assert_eq!(fs::read_to_string(outside.path().join("secret")).unwrap(), "secret");
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
}

#[test]
fn layers_are_read_however_they_are_packed_and_checked() {
    let layer = LayerFile::new().file("a", &[7; 10_000]).bytes();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&layer).unwrap();
    let packed = [layer.clone(), gzip.finish().unwrap(), zstd::encode_all(&*layer, 1).unwrap()];
    for packed in &packed {
        let place = Unpacked::new();
        assert_eq!(place.try_apply(&layer, packed, 10_000).unwrap().bytes, 10_000);
        let refusal = Unpacked::new().try_apply(&layer, packed, 9_999).unwrap_err();
        assert!(refusal.to_string().contains("more than 9999 bytes"), "{refusal}");
        let refusal = Unpacked::new().try_apply(b"another", packed, 10_000).unwrap_err();
        assert!(matches!(refusal, ContainerError::Checksum { .. }), "{refusal}");
        for length in [0, 1, 3, 300, packed.len() - 1] {
            let cut = &packed[..length.min(packed.len() - 1)];
            Unpacked::new().try_apply(&layer, cut, 10_000).unwrap_err();
        }
    }
    // Limits hold for all layers together.
    let place = Unpacked::new();
    place.try_apply(&layer, &layer, 10_001).unwrap();
    let more = LayerFile::new().file("b", b"12").bytes();
    assert!(matches!(place.try_apply(&more, &more, 10_001), Err(ContainerError::TooLarge { .. })));
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(64))]
    #[test]
    fn no_layer_is_a_panic(noise in proptest::collection::vec(0..=255_u8, 0..600), at in 0..1024_usize) {
        let mut layer = LayerFile::new().folder("a").file("a/b", b"x").link(EntryType::Symlink, "c", "a").bytes();
        for (index, byte) in noise.iter().enumerate() {
            let count = layer.len();
            layer[(at + index * 3) % count] ^= byte & 0x11;
        }
        let place = Unpacked::new();
        let _ = place.try_apply(&layer, &layer, 1 << 20);
    }
}

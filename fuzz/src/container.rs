//! Container images: what registries and layouts say of them, and layers that are unpacked.

use tar::{Builder, EntryType, Header};
use whimbrel_container::{ContainerImage, LayerLimits, apply_layer, manifest_of};

/// Bytes of a header of tar.
const HEADER: usize = 512;

/// Manifests, indexes and configurations.
pub fn container_manifest(data: &[u8]) {
    if let Ok(Ok(manifest)) = manifest_of(data) {
        assert!(manifest.layers.len() <= 500);
    }
    if let Ok(image) = ContainerImage::of_parts(data, Vec::new()) {
        assert!(!image.program().is_empty());
    }
}

/// A layer is unpacked into its folder, and nowhere else. Checksums of its headers are made right first, so
/// that what is in them is read.
pub fn container_layer(data: &[u8]) {
    let mut layer = data.to_vec();
    let mut at = 0;
    while let Some(header) = layer.get_mut(at..at + HEADER) {
        let mut fixed = Header::new_old();
        fixed.as_mut_bytes().copy_from_slice(header);
        fixed.set_cksum();
        header.copy_from_slice(fixed.as_bytes());
        let size = fixed.entry_size().unwrap_or(0).next_multiple_of(HEADER as u64);
        at = at.saturating_add(HEADER).saturating_add(usize::try_from(size).unwrap_or(usize::MAX));
        if at > layer.len() {
            break;
        }
    }
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let place = dir.path().join("place");
    std::fs::create_dir(&place).expect("a directory");
    let limits = LayerLimits { length: layer.len() as u64, bytes: 1 << 20, diff_id: String::new() };
    // No digest is the right one, so what is unpacked is refused at the end.
    assert!(apply_layer(&place, &*layer, &limits).is_err());
    let beside = std::fs::read_dir(dir.path()).expect("the directory").count();
    assert_eq!(beside, 1, "something beside the folder of the layer");
}

pub(crate) fn manifests() -> Vec<Vec<u8>> {
    let digest = format!("sha256:{}", "a".repeat(64));
    let part = format!(r#"{{"mediaType":"x","digest":"{digest}","size":3}}"#);
    let platform = r#""platform":{"os":"linux","architecture":"amd64"}"#;
    [
        format!(r#"{{"schemaVersion":2,"config":{part},"layers":[{part},{part}]}}"#),
        format!(r#"{{"manifests":[{{"digest":"{digest}","size":1,{platform}}}]}}"#),
        r#"{"os":"linux","architecture":"amd64","rootfs":{"diff_ids":[]},"config":{"Env":["A=b"],"Cmd":["/x"],"User":"1:2"}}"#.to_owned(),
    ]
    .map(String::into_bytes)
    .to_vec()
}

pub(crate) fn layers() -> Vec<Vec<u8>> {
    let mut layer = Builder::new(Vec::new());
    let entries = [
        (EntryType::Directory, "a/", ""),
        (EntryType::Regular, "a/file", "content"),
        (EntryType::Regular, "a/.wh.gone", ""),
        (EntryType::Regular, "b/.wh..wh..opq", ""),
        (EntryType::Fifo, "fifo", ""),
    ];
    for (kind, name, content) in entries {
        let mut header = header(kind);
        header.set_size(content.len() as u64);
        layer.append_data(&mut header, name, content.as_bytes()).expect("an entry");
    }
    for (kind, name, target) in [(EntryType::Symlink, "link", "/a"), (EntryType::Link, "hard", "a/file")] {
        layer.append_link(&mut header(kind), name, target).expect("a link");
    }
    let mut last = header(EntryType::Regular);
    last.set_size(1);
    layer.append_data(&mut last, "link/through", &b"x"[..]).expect("an entry");
    vec![layer.into_inner().expect("a layer")]
}

fn header(kind: EntryType) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_uid(1);
    header.set_gid(1);
    header.set_mtime(1);
    header
}

//! An image as a folder or an archive has it: in the layout of the Open Container Initiative
//! (image-spec, `image-layout.md`), or as `docker save` writes it.
//!
//! Its parts are named by their digests, and the digest of a layer before compression is in the configuration
//! (`rootfs.diff_ids`). So whoever knows the digest of the manifest knows all of it.

use crate::{
    ContainerError,
    blobs::{Blobs, Part},
    program::Program,
};
use aws_lc_rs::digest;
use serde::{Deserialize, de::DeserializeOwned};
use std::{collections::BTreeMap, fs::File, path::Path};

/// Longest index, manifest or configuration: 4 MiB, as registries have it (distribution-spec, "Pushing
/// Manifests").
const TEXT_MAX: u64 = 4 << 20;
/// Most layers of an image.
const LAYERS_MAX: usize = 500;
/// Indexes in indexes that are followed.
const DEPTH_MAX: usize = 4;
/// Where machines run.
const SYSTEM: &str = "linux/amd64";
/// Annotation of a manifest with its name in the layout (image-spec, `annotations.md`).
const NAME: &str = "org.opencontainers.image.ref.name";

const MARK: &str = "oci-layout";
const INDEX: &str = "index.json";
const DOCKER: &str = "manifest.json";

/// A layer that has not been unpacked: a tar archive, perhaps compressed, in a part of a file.
#[derive(Debug)]
pub struct Layer {
    /// File with the layer, perhaps among others.
    pub file: File,
    /// Where the layer begins in it, in bytes.
    pub offset: u64,
    /// Length of the layer in bytes.
    pub length: u64,
    /// Digest before compression, like `sha256:…`.
    pub diff_id: String,
}

/// An image: its program and its layers, the lowest first.
#[derive(Debug)]
pub struct ContainerImage {
    program: Program,
    /// Layers, the lowest first.
    pub layers: Vec<Layer>,
}

/// Reference to a part (image-spec, `descriptor.md`).
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Digest of the part, like `sha256:…`.
    pub digest: String,
    /// Length of the part in bytes.
    pub size: u64,
    #[serde(default)]
    platform: Option<Platform>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    os: String,
    architecture: String,
}

impl Platform {
    fn name(&self) -> String {
        format!("{}/{}", self.os, self.architecture)
    }
}

/// Parts of an image (image-spec, `manifest.md`).
#[derive(Debug, Clone, Deserialize)]
pub struct Manifest {
    /// Configuration of the image, with its program.
    pub config: Descriptor,
    /// The layers, the lowest first.
    pub layers: Vec<Descriptor>,
}

/// An index (image-spec, `image-index.md`), or a manifest; registries answer with either.
#[derive(Debug, Deserialize)]
struct IndexOrManifest {
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

/// What `docker save` writes beside the parts.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    layers: Vec<String>,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct Configuration {
    os: String,
    architecture: String,
    #[serde(default)]
    config: Option<Program>,
    rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

/// Whether the file or folder has a container image, by what a folder or the start of a tar archive has.
pub fn is_container(path: &Path, is_tar: bool) -> bool {
    if path.is_dir() {
        return path.join(MARK).is_file();
    }
    let is_part =
        |blobs: Blobs| [MARK, INDEX, DOCKER].iter().any(|name| matches!(blobs.part(name), Ok(Some(_))));
    is_tar && Blobs::open(path).is_ok_and(is_part)
}

/// The manifest that a registry answers with, or the descriptor of the one for this system if it answers with
/// an index.
pub fn manifest_of(text: &[u8]) -> Result<Result<Manifest, Descriptor>, ContainerError> {
    let found: IndexOrManifest = parsed("the manifest", text)?;
    match found {
        IndexOrManifest { config: Some(config), layers: Some(layers), .. } => {
            Ok(Ok(checked(Manifest { config, layers })?))
        }
        IndexOrManifest { manifests: Some(all), .. } => Ok(Err(chosen(all)?)),
        _ => Err(ContainerError::invalid("the manifest", "it names neither layers nor other manifests")),
    }
}

impl ContainerImage {
    /// The image in a folder or an archive.
    pub fn open(path: &Path) -> Result<Self, ContainerError> {
        let blobs = Blobs::open(path)?;
        match blobs.content(INDEX, TEXT_MAX)? {
            Some(index) => Self::of_layout(&blobs, &index),
            None => Self::of_docker(&blobs),
        }
    }

    /// The image with this configuration and these layers, each a file with its length.
    pub fn of_parts(config: &[u8], layers: Vec<(File, u64)>) -> Result<Self, ContainerError> {
        let parts = layers.into_iter().map(|(file, length)| Part { file, offset: 0, length });
        Self::of(config, parts.collect())
    }

    fn of_layout(blobs: &Blobs, index: &[u8]) -> Result<Self, ContainerError> {
        let mut text = index.to_vec();
        for _ in 0..DEPTH_MAX {
            let manifest = match manifest_of(&text)? {
                Ok(manifest) => manifest,
                Err(next) => {
                    text = blob(blobs, &next)?;
                    continue;
                }
            };
            let config = blob(blobs, &manifest.config)?;
            let layer = |layer: &Descriptor| {
                let name = blob_name(layer)?;
                blobs.part(&name)?.ok_or(ContainerError::Missing { part: name })
            };
            let layers = manifest.layers.iter().map(layer).collect::<Result<_, _>>()?;
            return Self::of(&config, layers);
        }
        Err(ContainerError::invalid(INDEX, "indexes lead to indexes without end"))
    }

    fn of_docker(blobs: &Blobs) -> Result<Self, ContainerError> {
        let missing = |part: &str| ContainerError::Missing { part: part.to_owned() };
        let list = blobs.content(DOCKER, TEXT_MAX)?.ok_or_else(|| missing(INDEX))?;
        let saved: Vec<Saved> = parsed(DOCKER, &list)?;
        let saved = match <[Saved; 1]>::try_from(saved) {
            Ok([saved]) => saved,
            Err(all) => {
                let name = |saved: Saved| saved.repo_tags.unwrap_or_default().join(" ");
                return Err(ContainerError::Several { names: all.into_iter().map(name).collect() });
            }
        };
        let config = blobs.content(&saved.config, TEXT_MAX)?.ok_or_else(|| missing(&saved.config))?;
        let layer = |name: &String| blobs.part(name)?.ok_or_else(|| missing(name));
        Self::of(&config, saved.layers.iter().map(layer).collect::<Result<_, _>>()?)
    }

    fn of(config: &[u8], layers: Vec<Part>) -> Result<Self, ContainerError> {
        const PART: &str = "the configuration";
        let found: Configuration = parsed(PART, config)?;
        let (os, architecture) = (found.os, found.architecture);
        check_system(&Platform { os, architecture })?;
        let ids = found.rootfs.diff_ids;
        if ids.len() != layers.len() || ids.len() > LAYERS_MAX {
            let reason = format!("it names {} layers, and there are {}", ids.len(), layers.len());
            return Err(ContainerError::invalid(PART, reason));
        }
        let layer = |(part, diff_id): (Part, String)| Layer {
            file: part.file,
            offset: part.offset,
            length: part.length,
            diff_id,
        };
        let layers = layers.into_iter().zip(ids).map(layer).collect();
        Ok(Self { program: found.config.unwrap_or_default(), layers })
    }

    /// The words of its program and of its arguments.
    pub fn program(&self) -> Vec<String> {
        self.program.words()
    }

    /// The script by which a machine starts its program.
    pub(crate) fn script(&self) -> Result<String, ContainerError> {
        self.program.script()
    }
}

fn parsed<T: DeserializeOwned>(part: &str, text: &[u8]) -> Result<T, ContainerError> {
    serde_json::from_slice(text).map_err(|error| ContainerError::invalid(part, error))
}

fn check_system(found: &Platform) -> Result<(), ContainerError> {
    match found.name() == SYSTEM {
        true => Ok(()),
        false => Err(ContainerError::Platform { wanted: SYSTEM, found: found.name() }),
    }
}

fn checked(manifest: Manifest) -> Result<Manifest, ContainerError> {
    match manifest.layers.len() > LAYERS_MAX {
        true => Err(ContainerError::TooMany { limit: LAYERS_MAX }),
        false => Ok(manifest),
    }
}

/// The one entry of an index that is for this system.
fn chosen(all: Vec<Descriptor>) -> Result<Descriptor, ContainerError> {
    let found: Vec<_> = all.iter().filter_map(|entry| entry.platform.as_ref()).map(Platform::name).collect();
    // A layout with one image often does not say for which system it is; its configuration does.
    let fits = |entry: &Descriptor| entry.platform.as_ref().is_none_or(|its| its.name() == SYSTEM);
    let mut fitting: Vec<_> = all.into_iter().filter(fits).collect();
    match fitting.len() {
        1 => Ok(fitting.remove(0)),
        0 => Err(ContainerError::Platform { wanted: SYSTEM, found: found.join(", ") }),
        _ => {
            let name = |entry: &Descriptor| {
                let named = entry.annotations.as_ref().and_then(|notes| notes.get(NAME));
                named.unwrap_or(&entry.digest).clone()
            };
            Err(ContainerError::Several { names: fitting.iter().map(name).collect() })
        }
    }
}

/// Name of a part in a layout.
fn blob_name(descriptor: &Descriptor) -> Result<String, ContainerError> {
    let digits = descriptor.digest.strip_prefix("sha256:").filter(|digits| digits.len() == 64);
    match digits.filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit())) {
        Some(digits) => Ok(format!("blobs/sha256/{digits}")),
        None => Err(ContainerError::invalid(format!("{:?}", descriptor.digest), "it is no SHA-256")),
    }
}

/// A part of a layout that is no layer, checked against its digest.
fn blob(blobs: &Blobs, descriptor: &Descriptor) -> Result<Vec<u8>, ContainerError> {
    let name = blob_name(descriptor)?;
    let content = blobs.content(&name, TEXT_MAX)?;
    let content = content.ok_or_else(|| ContainerError::Missing { part: name.clone() })?;
    match sha256(&content) == descriptor.digest {
        true => Ok(content),
        false => Err(ContainerError::invalid(name, "its checksum is another one")),
    }
}

/// Digest of `content`, like `sha256:…`.
pub(crate) fn sha256(content: &[u8]) -> String {
    digest_text(&digest::digest(&digest::SHA256, content))
}

/// Text of a SHA-256.
pub(crate) fn digest_text(digest: &digest::Digest) -> String {
    let digits: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::{fs, path::PathBuf};

    struct Layout(tempfile::TempDir);

    impl Layout {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir_all(dir.path().join("blobs/sha256")).unwrap();
            fs::write(dir.path().join(MARK), r#"{"imageLayoutVersion": "1.0.0"}"#).unwrap();
            Self(dir)
        }

        fn path(&self) -> &Path {
            self.0.path()
        }

        fn blob(&self, content: &[u8]) -> Value {
            let digest = sha256(content);
            fs::write(self.blob_path(&digest), content).unwrap();
            json!({ "mediaType": "x", "digest": digest, "size": content.len() })
        }

        fn blob_path(&self, digest: &str) -> PathBuf {
            self.path().join("blobs/sha256").join(digest.strip_prefix("sha256:").unwrap())
        }

        /// A manifest of an image with these layers; the entry of the index for it.
        fn manifest(&self, layers: &[&[u8]], architecture: &str) -> Value {
            let ids: Vec<_> = layers.iter().map(|layer| sha256(layer)).collect();
            let config = json!({
                "os": "linux", "architecture": architecture, "config": {"Cmd": ["/serve"]},
                "rootfs": {"type": "layers", "diff_ids": ids},
            });
            let config = self.blob(config.to_string().as_bytes());
            let layers: Vec<_> = layers.iter().map(|layer| self.blob(layer)).collect();
            self.blob(
                json!({ "schemaVersion": 2, "config": config, "layers": layers }).to_string().as_bytes(),
            )
        }

        fn index(&self, manifests: &[Value]) {
            let index = json!({ "schemaVersion": 2, "manifests": manifests });
            fs::write(self.path().join(INDEX), index.to_string()).unwrap();
        }

        fn refusal(&self) -> String {
            ContainerImage::open(self.path()).unwrap_err().to_string()
        }
    }

    fn with(mut entry: Value, field: &str, value: Value) -> Value {
        entry[field] = value;
        entry
    }

    #[test]
    fn a_layout_gives_its_program_and_its_layers_in_order() {
        let layout = Layout::new();
        let arm = with(
            layout.manifest(&[b"arm"], "arm64"),
            "platform",
            json!({"os": "linux", "architecture": "arm64"}),
        );
        let ours = with(
            layout.manifest(&[b"one", b"three"], "amd64"),
            "platform",
            json!({"os": "linux", "architecture": "amd64"}),
        );
        let inner = layout.blob(json!({ "manifests": [arm, ours] }).to_string().as_bytes());
        layout.index(&[inner]);
        assert!(is_container(layout.path(), false));
        let image = ContainerImage::open(layout.path()).unwrap();
        assert_eq!(image.program(), ["/serve"]);
        let layers: Vec<_> = image.layers.iter().map(|layer| (layer.length, layer.diff_id.clone())).collect();
        assert_eq!(layers, [(3, sha256(b"one")), (5, sha256(b"three"))]);
    }

    #[test]
    fn what_is_missing_changed_or_for_another_system_is_said() {
        let layout = Layout::new();
        assert!(layout.refusal().contains("index.json of the image is missing"));
        let entry = layout.manifest(&[b"layer"], "amd64");
        layout.index(&[entry.clone(), with(entry.clone(), "annotations", json!({NAME: "3.20"}))]);
        let refusal = layout.refusal();
        assert!(refusal.contains("there are 2 images") && refusal.contains("3.20"), "{refusal}");

        layout.index(&[layout.manifest(&[b"x"], "riscv64")]);
        assert!(layout.refusal().contains("linux/riscv64"));

        layout.index(std::slice::from_ref(&entry));
        let digest = entry["digest"].as_str().unwrap().to_owned();
        fs::write(layout.blob_path(&digest), "{}").unwrap();
        assert!(layout.refusal().contains("checksum"));
        fs::remove_file(layout.blob_path(&digest)).unwrap();
        assert!(layout.refusal().contains("missing"));

        for odd in ["sha256:../../../etc/passwd", "md5:00", ""] {
            layout.index(&[with(entry.clone(), "digest", json!(odd))]);
            assert!(layout.refusal().contains("no SHA-256"), "{odd}");
        }
        fs::write(layout.path().join(INDEX), "[").unwrap();
        assert!(layout.refusal().contains("cannot be read"));
    }

    #[test]
    fn indexes_in_indexes_end() {
        let layout = Layout::new();
        let mut entry = layout.manifest(&[], "amd64");
        for _ in 0..DEPTH_MAX {
            entry = layout.blob(json!({ "manifests": [entry] }).to_string().as_bytes());
        }
        layout.index(&[entry]);
        assert!(layout.refusal().contains("without end"));
    }

    #[test]
    fn archives_of_both_kinds_are_read_where_they_lie() {
        let config = json!({"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": ["sha256:1"]}});
        let saved = json!([{"Config": "c.json", "Layers": ["a/layer.tar"], "RepoTags": ["x:1"]}]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("saved.tar");
        let mut builder = tar::Builder::new(File::create(&path).unwrap());
        for (name, content) in
            [("c.json", config.to_string()), ("a/layer.tar", "layer".into()), (DOCKER, saved.to_string())]
        {
            let mut header = tar::Header::new_ustar();
            header.set_size(content.len() as u64);
            builder.append_data(&mut header, name, content.as_bytes()).unwrap();
        }
        builder.finish().unwrap();
        assert!(is_container(&path, true) && !is_container(&path, false));
        let image = ContainerImage::open(&path).unwrap();
        let [layer] = &image.layers[..] else { panic!("{image:?}") };
        let mut found = vec![0; 5];
        std::os::unix::fs::FileExt::read_exact_at(&layer.file, &mut found, layer.offset).unwrap();
        assert_eq!((layer.length, &*layer.diff_id, &*found), (5, "sha256:1", &b"layer"[..]));
        assert_eq!(image.program(), ["/bin/sh"]);
    }

    proptest::proptest! {
        #[test]
        fn no_text_of_a_registry_is_a_panic(text in ".{0,200}") {
            let _ = manifest_of(text.as_bytes());
            let _ = ContainerImage::of_parts(text.as_bytes(), Vec::new());
        }
    }
}

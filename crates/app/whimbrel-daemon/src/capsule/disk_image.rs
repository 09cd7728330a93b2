//! Disk images of users: recognised by their content, and converted outside this process.
//!
//! The image is opened here and served to the tool, which may open no file; the disk comes back into a file
//! without a name. Whatever happens, nothing is left but what the caller makes of it.

use super::appliance;
use crate::core::{directories::Directories, error::DaemonError};
use std::{
    fs::{self, File},
    io::Seek,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};
use whimbrel_block::{Device, FileDevice};
use whimbrel_container::ContainerImage;
use whimbrel_core::PAGE_SIZE;
use whimbrel_nbd::Server;
use whimbrel_qemu::{Conversion, ImageError, ImageFormat};

/// Path of this program, also after its file was replaced.
pub(crate) const PROGRAM: &str = "/proc/self/exe";

/// Refuses a file that cannot be a disk as it is: with the magic of another format than raw, its tables would
/// be taken for the disk.
pub(crate) fn check_raw(path: &Path) -> Result<(), DaemonError> {
    let format = File::open(path).and_then(|file| ImageFormat::of(&file));
    match format.map_err(|source| DaemonError::io("open", path, source))? {
        ImageFormat::Raw => Ok(()),
        format => Err(DaemonError::NotRaw { path: path.to_owned(), format }),
    }
}

/// Opens a container image; none if the file or folder has none.
pub(super) fn open_container(path: &Path) -> Result<Option<ContainerImage>, DaemonError> {
    let format = || File::open(path).and_then(|file| ImageFormat::of(&file));
    let is_tar = !path.is_dir() && format().is_ok_and(ImageFormat::is_tar);
    if !whimbrel_container::is_container(path, is_tar) {
        return Ok(None);
    }
    let failed = |source| DaemonError::Container { path: path.to_owned(), source };
    ContainerImage::open(path).map(Some).map_err(failed)
}

/// Opens the disk in an image file of any format that is read, or the disks of an appliance.
pub(super) fn open_images(
    layout: &Directories,
    path: &Path,
    cancelled: &dyn Fn() -> bool,
) -> Result<Vec<FileDevice>, DaemonError> {
    let io = |source| DaemonError::io("read", path, source);
    let file = File::open(path).map_err(io)?;
    if file.metadata().map_err(io)?.is_dir() {
        return Err(DaemonError::invalid(format!("{} is a directory", path.display())));
    }
    let appliance = match ImageFormat::of(&file).map_err(io)?.is_tar() {
        true => appliance::disks_in(layout, (&file, path), cancelled)?,
        false => None,
    };
    let files = appliance.unwrap_or_else(|| vec![file]);
    files.into_iter().map(|file| disk_in(layout, (file, path), cancelled)).collect()
}

/// The disk in an open image file of any format that is read; errors call it `path`.
pub(crate) fn disk_in(
    layout: &Directories,
    (file, path): (File, &Path),
    cancelled: &dyn Fn() -> bool,
) -> Result<FileDevice, DaemonError> {
    let io = |source| DaemonError::io("read", path, source);
    let mut file = file;
    let mut format = ImageFormat::of(&file).map_err(io)?;
    if let ImageFormat::Compressed(compression) = format {
        file = decompressed(layout, (file, path), cancelled)?;
        format = ImageFormat::of(&file).map_err(io)?;
        if format.is_tar() {
            // Unpacked by its owner it may be a container image, which is read from its own file.
            let source = ImageError::Unsupported { format: compression };
            return Err(DaemonError::Image { path: path.to_owned(), source });
        }
    }
    format.check_alone(&file).map_err(image_error(path))?;
    let disk = match format {
        ImageFormat::Raw => file,
        _ => converted(layout, (file, path), format, cancelled)?,
    };
    // The last page is padded with zeros.
    let disk = FileDevice::new(disk, true).map_err(io)?;
    match disk.size() {
        0 => Err(DaemonError::invalid(format!("{} is empty", path.display()))),
        _ => Ok(disk),
    }
}

/// The image in a compressed file, in a file without a name.
fn decompressed(
    layout: &Directories,
    (mut file, path): (File, &Path),
    cancelled: &dyn Fn() -> bool,
) -> Result<File, DaemonError> {
    const NAME: &str = "image";
    file.rewind().map_err(|source| DaemonError::io("read", path, source))?;
    let dir = ScratchDir::on_disk(layout)?;
    let program = (Path::new(PROGRAM), vec!["decompress-image".to_owned(), NAME.to_owned()]);
    whimbrel_qemu::decompressed(dir.path(), program, (file, NAME), cancelled).map_err(image_error(path))
}

fn converted(
    layout: &Directories,
    (image, path): (File, &Path),
    format: ImageFormat,
    cancelled: &dyn Fn() -> bool,
) -> Result<File, DaemonError> {
    let read = |source| DaemonError::io("read", path, source);
    let dir = ScratchDir::create(layout)?;
    let length = image.metadata().map_err(read)?.len();
    let tool = Conversion::new(dir.path(), format, length).map_err(image_error(path))?;
    let image = FileDevice::new(image, true).map_err(read)?;
    let _input = dir.serve(Arc::new(image), Conversion::INPUT)?;
    let size = tool.disk_size(cancelled).map_err(image_error(path))?;

    let disk = unnamed_file(layout, size)?;
    let room = disk.try_clone().and_then(|file| FileDevice::new(file, false)).map_err(read)?;
    let output = dir.serve(Arc::new(room), Conversion::OUTPUT)?;
    tool.write(size, cancelled).map_err(image_error(path))?;
    output.stop();
    Ok(disk)
}

/// Directory for what comes from outside, removed when dropped. A starting daemon removes what is left of an
/// earlier one.
pub(crate) struct ScratchDir(PathBuf);

impl ScratchDir {
    pub(crate) fn create(layout: &Directories) -> Result<Self, DaemonError> {
        Self::below(&layout.runtime_dirs())
    }

    /// A directory for more than there is memory for.
    pub(crate) fn on_disk(layout: &Directories) -> Result<Self, DaemonError> {
        let imports = layout.imports();
        match fs::DirBuilder::new().mode(0o700).create(&imports) {
            Err(source) if source.kind() != std::io::ErrorKind::AlreadyExists => {
                Err(DaemonError::io("create", &imports, source))
            }
            _ => Self::below(&imports),
        }
    }

    /// Removes what imports of an earlier daemon left on the disk.
    pub(crate) fn sweep(layout: &Directories) {
        let imports = layout.imports();
        match fs::remove_dir_all(&imports) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(dir = %imports.display(), %error, "could not remove what an import left");
            }
            _ => {}
        }
    }

    fn below(folder: &Path) -> Result<Self, DaemonError> {
        let dir = folder.join(format!("import-{:016x}", rand::random::<u64>()));
        let made = fs::DirBuilder::new().mode(0o700).create(&dir);
        made.map_err(|source| DaemonError::io("create", &dir, source))?;
        Ok(Self(dir))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    fn serve(&self, device: Arc<dyn Device>, name: &str) -> Result<Server, DaemonError> {
        let socket = self.0.join(name);
        let server = whimbrel_nbd::bind_private(&socket)
            .and_then(|listener| whimbrel_nbd::serve(device, listener, whimbrel_nbd::Options::default()));
        server.map_err(|source| DaemonError::io("serve an image on", &socket, source))
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(dir = %self.0.display(), %error, "could not remove a directory for files from outside");
        }
    }
}

/// A file of holes that is gone when it is closed.
pub(crate) fn unnamed_file(layout: &Directories, size: u64) -> Result<File, DaemonError> {
    let path = layout.data().join(format!("import-{:016x}.raw", rand::random::<u64>()));
    let io = |source| DaemonError::io("create", &path, source);
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path);
    let file = file.map_err(io)?;
    fs::remove_file(&path).map_err(io)?;
    file.set_len(size.next_multiple_of(PAGE_SIZE as u64)).map_err(io)?;
    Ok(file)
}

fn image_error(path: &Path) -> impl FnOnce(ImageError) -> DaemonError {
    let path = path.to_owned();
    move |source| match source {
        ImageError::Cancelled => DaemonError::Cancelled { left: "nothing was imported".into() },
        source => DaemonError::Image { path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::fs::FileExt, process::Command};

    const MIB: usize = 1 << 20;

    struct Fixture {
        dir: tempfile::TempDir,
        layout: Directories,
    }

    impl Fixture {
        fn new() -> Self {
            let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
            let layout = Directories::create(&dir.path().join("data"), &dir.path().join("run"));
            Self { layout: layout.expect("directories"), dir }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        /// A raw disk of 16 MiB with something at its start, in its middle and at its end.
        fn raw(&self) -> PathBuf {
            let mut disk = vec![0; 16 * MIB];
            for at in [0, 7 * MIB, 16 * MIB - 4096] {
                disk[at..at + 4096].fill(0xa5);
            }
            let path = self.path("disk.raw");
            fs::write(&path, disk).expect("a disk");
            path
        }

        fn qemu_img(&self, arguments: &[&str]) {
            let output = Command::new("qemu-img").args(arguments).current_dir(self.dir.path()).output();
            let output = output.expect("qemu-img is installed");
            assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        }

        fn open(&self, name: &str) -> Result<FileDevice, DaemonError> {
            let mut disks = open_images(&self.layout, &self.path(name), &|| false)?;
            assert_eq!(disks.len(), 1);
            Ok(disks.remove(0))
        }

        /// What a user reads when an image is refused.
        fn refusal(&self, name: &str) -> String {
            let Err(error) = self.open(name) else { panic!("{name} was read") };
            let api = error.to_api();
            assert_eq!(api.code, whimbrel_api::ErrorCode::Invalid, "{api:?}");
            format!("{} {}", api.causes.join(" "), api.hint.unwrap_or_default())
        }
    }

    /// Nothing is left of a conversion, whatever its end.
    impl Drop for Fixture {
        fn drop(&mut self) {
            let left = |dir: &Path| fs::read_dir(dir).expect("a directory").count();
            let stray = fs::read_dir(self.layout.data()).expect("a directory").flatten();
            let stray: Vec<_> =
                stray.filter(|entry| entry.file_name().to_string_lossy().contains("import")).collect();
            assert!(left(&self.layout.runtime_dirs()) == 0 && stray.is_empty() || std::thread::panicking());
        }
    }

    #[test]
    fn images_of_every_format_have_the_bytes_of_their_disk_whatever_their_names() {
        let fixture = Fixture::new();
        let raw = fixture.raw();
        let expected = fs::read(&raw).expect("the disk");
        let formats = [
            ("qcow2", "compat=0.10"),
            ("qcow2", "compat=1.1"),
            ("vmdk", "subformat=monolithicSparse"),
            ("vmdk", "subformat=streamOptimized"),
            ("vhdx", "subformat=dynamic"),
            ("vpc", "subformat=dynamic"),
            ("vpc", "subformat=fixed,force_size=on"),
        ];
        for (format, options) in formats {
            fixture.qemu_img(&["convert", "-f", "raw", "-O", format, "-o", options, "disk.raw", "image.img"]);
            let disk = fixture.open("image.img").unwrap_or_else(|error| panic!("{format}: {:?}", error));
            let mut content = vec![0; expected.len()];
            disk.read_at(0, &mut content).expect("the disk");
            assert!(content == expected, "{format}, {options}");
            // Virtual PC rounds up to a cylinder, vhdx to a MiB.
            assert!(disk.size() - (expected.len() as u64) < MIB as u64, "{format}: {}", disk.size());
            let refusal = check_raw(&fixture.path("image.img")).expect_err("the disk of a machine").to_api();
            assert!(refusal.message.contains(format), "{refusal:?}");
            assert!(refusal.hint.expect("a hint").contains("whimbrel import"));
        }
        check_raw(&raw).expect("a raw disk");
        assert_eq!(fixture.open("disk.raw").expect("a raw disk").size(), expected.len() as u64);
    }

    #[test]
    fn an_image_that_names_another_file_is_refused_by_that_name() {
        let fixture = Fixture::new();
        fixture.raw();
        fs::write(fixture.path("secret"), vec![b's'; MIB]).expect("a file of this host");
        let secret = fixture.path("secret").display().to_string();
        fixture.qemu_img(&["create", "-f", "qcow2", "-b", &secret, "-F", "raw", "backed.qcow2"]);
        let refusal = fixture.refusal("backed.qcow2");
        assert!(refusal.contains("backing file") && refusal.contains(&secret), "{refusal}");

        let options = format!("data_file={}", fixture.path("content").display());
        fixture.qemu_img(&["create", "-f", "qcow2", "-o", &options, "split.qcow2", "1M"]);
        let refusal = fixture.refusal("split.qcow2");
        assert!(refusal.contains("data file") && refusal.contains("/content"), "{refusal}");

        fixture.qemu_img(&["convert", "-O", "vmdk", "disk.raw", "parent.vmdk"]);
        fixture.qemu_img(&["create", "-f", "vmdk", "-b", "parent.vmdk", "-F", "vmdk", "child.vmdk"]);
        let refusal = fixture.refusal("child.vmdk");
        assert!(refusal.contains("backing file") && refusal.contains("parent.vmdk"), "{refusal}");

        let flat = "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
                    createType=\"monolithicFlat\"\nRW 2048 FLAT \"secret\" 0\n";
        fs::write(fixture.path("flat.vmdk"), flat).expect("a descriptor");
        assert!(fixture.refusal("flat.vmdk").contains("vmdk with its content in other files"));
        // With a capacity of zero QEMU takes a sparse file for a descriptor.
        let mut sparse = fs::read(fixture.path("parent.vmdk")).expect("an image");
        sparse[12..20].fill(0);
        sparse[0x200..0x200 + flat.len()].copy_from_slice(flat.as_bytes());
        fs::write(fixture.path("sparse.vmdk"), sparse).expect("an image");
        let refusal = fixture.refusal("sparse.vmdk");
        assert!(refusal.contains("extent") && refusal.contains("secret"), "{refusal}");
    }

    #[test]
    fn damaged_and_absurd_images_are_refused_and_a_cancelled_one_ends() {
        let fixture = Fixture::new();
        fixture.raw();
        fixture.qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "disk.raw", "good.qcow2"]);
        let good = fs::read(fixture.path("good.qcow2")).expect("an image");
        for length in [4, 30, 71, 90] {
            fs::write(fixture.path("cut.qcow2"), &good[..length]).expect("an image");
            fixture.refusal("cut.qcow2");
        }
        let image = File::options().write(true).open(fixture.path("good.qcow2")).expect("an image");
        // QEMU has limits of its own far above ours, so the table stays small: clusters of 2 MiB.
        fixture.qemu_img(&["create", "-f", "qcow2", "-o", "cluster_size=2M", "huge.qcow2", "64T"]);
        assert!(fixture.refusal("huge.qcow2").contains("the limit is"));
        image.write_all_at(&(1_u64 << 62).to_be_bytes(), 24).expect("a header");
        fixture.refusal("good.qcow2");

        fs::write(fixture.path("good.qcow2"), &good).expect("an image");
        let cancelled = open_images(&fixture.layout, &fixture.path("good.qcow2"), &|| true);
        assert!(matches!(cancelled, Err(DaemonError::Cancelled { .. })));
        fs::write(fixture.path("empty.img"), "").expect("a file");
        assert!(fixture.open("empty.img").is_err());
    }
}

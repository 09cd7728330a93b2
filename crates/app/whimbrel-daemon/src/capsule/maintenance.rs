//! Maintenance of the store, which needs no machine: garbage collection, verification, export and import of
//! capsules.

use crate::{
    capsule::disk_alignment::{aligned, first_alignment, unaligned},
    capsule::disk_image::{open_container, open_images},
    core::{error::DaemonError, operations::ProgressReporter, refs},
    daemon::Daemon,
};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufRead},
    os::unix::fs::FileExt,
    path::Path,
    process::Command,
    sync::Arc,
};
use whimbrel_api::{
    Damage, ErrorCode, ExportFormat, ExportRequest, ImportFormat, ImportRequest, Operation, OperationKind,
    OperationResult, Unit,
};
use whimbrel_block::{BlockError, Device, ExtentKind, FileDevice};
use whimbrel_core::{
    Accel, Boot, ByteSize, CapsuleId, DiskConfig, EXTENT_PAGES, EXTENT_SIZE, MachineConfig, PAGE_SIZE,
    PageRun, RefName,
};
use whimbrel_image::{ImageRef, Manifest};
use whimbrel_store::{
    CapsuleWriter, GcRoots, Store, StoreError, StoredDisk,
    encrypted_file::{DecryptingReader, EncryptingWriter, is_encrypted},
};

/// Memory of a machine that boots an imported disk, until its user changes it.
const IMPORTED_MEMORY: ByteSize = ByteSize(1 << 30);
/// The image that is exported by default.
const FIRST_DISK: &str = "disk0";

/// Shows how much of the store was read. Returns whether to go on.
pub(super) fn reading(reporter: &ProgressReporter) -> impl FnMut(u64, u64) -> bool {
    |done, total| {
        reporter.progress("reading", Unit::Bytes, done, Some(total));
        !reporter.is_cancelled()
    }
}

/// Reads and checks a whole store.
pub(crate) fn verify_store(
    store: &Store,
    reporter: &ProgressReporter,
) -> Result<OperationResult, DaemonError> {
    let report = store.verify(reading(reporter));
    let report = report.map_err(refs::cancellable("verify", "nothing was changed"))?;
    let capsules = store.capsules().map_err(refs::store_error("list its capsules"))?.len();
    let frames = report.damage.iter().map(|damage| Damage {
        place: format!("{} at byte {}", damage.file, damage.offset),
        problem: damage.reason.clone(),
    });
    let broken = report.broken.iter().map(|capsule| Damage {
        place: format!("capsule {}", capsule.id.short()),
        problem: match &capsule.image {
            Some(image) => format!("{} objects of its image {image} are missing", capsule.missing.len()),
            None => format!("{} of its objects are missing", capsule.missing.len()),
        },
    });
    Ok(OperationResult::Verify {
        capsules: capsules as u64,
        objects: report.objects,
        bytes: ByteSize(report.bytes),
        damaged: frames.chain(broken).collect(),
    })
}

impl Daemon {
    /// Frees objects that no ref, machine or writer needs.
    pub(crate) fn gc(self: &Arc<Self>) -> Operation {
        let host = self.clone();
        self.operations().start(OperationKind::Gc, "the store", move |reporter| {
            reporter.progress("collecting garbage", Unit::Bytes, 0, None);
            let before = host.stored_bytes();
            host.machines.unreadable.check_none()?;
            // A store that refuses writes after a failed sync would refuse to remove refs too.
            host.store.reopen().map_err(refs::store_error("open the store again"))?;
            refs::remove_outdated_previous(&host.store).map_err(refs::store_error("read the refs"))?;
            let report = host.store.gc_retaining(GcRoots::Referenced, &host.needed_capsules());
            let report = report.map_err(refs::store_error("collect garbage"))?;
            host.sweep_prefetch_lists()?;
            host.remove_partial_records()?;
            let stored = host.stored_bytes();
            Ok(OperationResult::Gc {
                freed: ByteSize(before.saturating_sub(stored)),
                stored: ByteSize(stored),
                moved: report.moved,
                packs_waiting: report.waiting as u64,
            })
        })
    }

    /// The capsules that machines need, whatever becomes of their refs. Running machines have pins too, which
    /// end when they stop.
    pub(super) fn needed_capsules(&self) -> Vec<CapsuleId> {
        self.machines.all().iter().flat_map(|machine| machine.needed_capsules()).collect()
    }

    /// Reads and checks the whole store.
    pub(crate) fn verify(self: &Arc<Self>) -> Operation {
        let host = self.clone();
        self.operations()
            .start(OperationKind::Verify, "the store", move |reporter| verify_store(&host.store, reporter))
    }

    /// Writes a capsule, or one image of it, to a new file.
    pub(crate) fn export(self: &Arc<Self>, request: ExportRequest) -> Result<Operation, DaemonError> {
        let capsule = refs::resolve(&self.store, &request.capsule)?;
        if request.key.is_some() && request.format != ExportFormat::Capsule {
            return Err(DaemonError::invalid("only a whole capsule can be encrypted"));
        }
        let (host, subject) = (self.clone(), request.capsule.to_string());
        Ok(self.operations().start(OperationKind::Export, subject, move |reporter| {
            let path = request.path.clone();
            let file = File::create_new(&path).map_err(|source| DaemonError::io("create", &path, source))?;
            let written = host.export_to(&capsule, &request, file, reporter);
            if written.is_err() {
                // A partial file would look like a complete one.
                let _ = std::fs::remove_file(&path);
            }
            Ok(OperationResult::Export { path, bytes: ByteSize(written?) })
        }))
    }

    fn export_to(
        &self,
        capsule: &CapsuleId,
        request: &ExportRequest,
        file: File,
        reporter: &ProgressReporter,
    ) -> Result<u64, DaemonError> {
        let path = &request.path;
        let io = |source| DaemonError::io("write", path, source);
        match request.format {
            ExportFormat::Capsule => {
                reporter.progress("writing", Unit::Bytes, 0, None);
                let mut output = std::io::BufWriter::new(&file);
                let failed = refs::store_error("export the capsule");
                match &request.key {
                    Some(key) => {
                        let mut encrypted = EncryptingWriter::new(output, key).map_err(io)?;
                        self.store.export(capsule, &mut encrypted).map_err(failed)?;
                        encrypted.finish().map_err(io)?;
                    }
                    None => drop(self.store.export(capsule, &mut output).map_err(failed)?),
                }
            }
            ExportFormat::Raw => write_raw(&*self.exported(capsule, request)?, &file, path, reporter)?,
            ExportFormat::Qcow2 => self.write_qcow2(self.exported(capsule, request)?, path, reporter)?,
        }
        file.sync_all().map_err(io)?;
        Ok(file.metadata().map_err(io)?.len())
    }

    /// An image as a block device, without its alignment.
    fn exported(&self, capsule: &CapsuleId, request: &ExportRequest) -> Result<Arc<dyn Device>, DaemonError> {
        let manifest = self.store.manifest(capsule).map_err(refs::store_error("read the capsule"))?;
        let name = request.image.as_deref().unwrap_or(FIRST_DISK);
        let image = manifest.image(name);
        let image = image.ok_or_else(|| DaemonError::NotFound { what: "image", name: name.to_owned() })?;
        let stored = StoredDisk::new(self.image(Some(*capsule), (name, image.root, image.pages)));
        let failed = |source| DaemonError::Disk { disk: name.to_owned(), source };
        unaligned(Arc::new(stored), image.cuts.as_ref()).map_err(failed)
    }

    /// Has qemu-img write a qcow2 file; it reads the image from an NBD server of this process.
    fn write_qcow2(
        &self,
        device: Arc<dyn Device>,
        path: &Path,
        reporter: &ProgressReporter,
    ) -> Result<(), DaemonError> {
        reporter.progress("converting", Unit::Bytes, 0, None);
        let socket = self.directories.runtime_dir(&format!("export-{:016x}", rand::random::<u64>()));
        let server = whimbrel_nbd::bind(&socket)
            .and_then(|listener| whimbrel_nbd::serve(device, listener, whimbrel_nbd::Options::default()));
        let server = server.map_err(|source| DaemonError::io("serve an image on", &socket, source))?;
        let source = format!("nbd+unix:///?socket={}", socket.display());
        let converted = qemu_img(&["convert", "-f", "raw", "-O", "qcow2", &source], path);
        server.stop();
        let _ = std::fs::remove_file(&socket);
        converted
    }

    pub(crate) fn import(self: &Arc<Self>, request: ImportRequest) -> Result<Operation, DaemonError> {
        refs::check_tag(Some(&request.name))?;
        let (host, subject) = (self.clone(), request.path.display().to_string());
        Ok(self.operations().start(OperationKind::Import, subject, move |reporter| {
            let before = host.stored_bytes();
            let capsule = match request.format {
                ImportFormat::Capsule => host.import_capsule(&request, reporter)?,
                ImportFormat::Disk => {
                    reporter.progress("opening", Unit::Bytes, 0, None);
                    host.import_image(&request, reporter)?
                }
            };
            let added = ByteSize(host.stored_bytes().saturating_sub(before));
            Ok(OperationResult::Import { capsule, added })
        }))
    }

    /// Makes a capsule of an image of a disk or of a container, whichever the content is.
    fn import_image(
        &self,
        request: &ImportRequest,
        reporter: &ProgressReporter,
    ) -> Result<CapsuleId, DaemonError> {
        let (path, name, labels) = (&*request.path, &request.name, BTreeMap::new());
        if let Some(image) = open_container(path)? {
            let host = self.host_files(path)?;
            return self.import_container((image, host), (path, name, labels), reporter);
        }
        let disks = open_images(&self.directories, path, &|| reporter.is_cancelled())?;
        self.import_disks(ImportedDisks { disks, path, name, labels, boot: None }, reporter)
    }

    fn import_capsule(
        &self,
        request: &ImportRequest,
        reporter: &ProgressReporter,
    ) -> Result<CapsuleId, DaemonError> {
        reporter.progress("reading", Unit::Bytes, 0, None);
        let path = &request.path;
        let file = File::open(path).map_err(|source| DaemonError::io("open", path, source))?;
        let mut input = std::io::BufReader::new(file);
        let names = std::slice::from_ref(&request.name);
        let beginning = input.fill_buf().map_err(|source| DaemonError::io("read", path, source))?;
        let imported = match (is_encrypted(beginning), &request.key) {
            (true, Some(key)) => {
                let input = DecryptingReader::new(input, key);
                self.store.import(input.map_err(|source| not_decrypted(path, source))?, names)
            }
            (true, None) => {
                return Err(DaemonError::invalid(format!(
                    "{} is encrypted, and needs its key",
                    path.display()
                )));
            }
            (false, Some(_)) => {
                return Err(DaemonError::invalid(format!("{} is not encrypted", path.display())));
            }
            (false, None) => self.store.import(input, names),
        };
        imported.map_err(refs::store_error("import the capsule"))
    }

    /// Makes a disk-only capsule of disks.
    pub(crate) fn import_disks(
        &self,
        new: ImportedDisks<'_>,
        reporter: &ProgressReporter,
    ) -> Result<CapsuleId, DaemonError> {
        let ImportedDisks { disks, path, name, labels, boot } = new;
        let write = refs::store_error("write the image");
        let sizes: Vec<_> = disks.iter().map(|disk| ByteSize(disk.size())).collect();
        let writer = self.store.writer().map_err(refs::store_error("begin to write"))?;
        let mut images = Vec::new();
        for (index, disk) in disks.into_iter().enumerate() {
            let image = write_disk(&writer, (index, disk), path, reporter)?;
            images.push(image);
        }
        let boot = boot.map(|boot| boot.store(&writer)).transpose().map_err(&write)?;
        let manifest = self.disk_manifest(&sizes, (images, boot), (name, labels))?;
        writer.commit(&manifest, std::slice::from_ref(name)).map_err(&write)
    }

    /// The manifest of a disk-only capsule: a machine that boots the first disk, or its own kernel.
    fn disk_manifest(
        &self,
        sizes: &[ByteSize],
        (images, boot): (Vec<ImageRef>, Option<Boot>),
        (name, mut labels): (&RefName, BTreeMap<String, String>),
    ) -> Result<Manifest, DaemonError> {
        let machine = MachineConfig {
            machine: self.qemu()?.machine_type("q35").unwrap_or("q35").to_owned(),
            accel: self.qemu().map_or(Accel::Tcg, whimbrel_qemu::best_accel),
            disks: sizes.iter().map(|size| DiskConfig { size: *size }).collect(),
            boot,
            agent_port: true,
            ..MachineConfig::minimal(IMPORTED_MEMORY)
        };
        labels.insert(refs::MACHINE_LABEL.to_owned(), name.to_string());
        Ok(Manifest {
            format: whimbrel_image::FORMAT,
            machine,
            device: Vec::new(),
            images,
            parents: Vec::new(),
            time: crate::now_ms(),
            host: self.name.to_string(),
            labels,
            working_set: None,
        })
    }
}

/// Puts a disk into the store, without its holes.
fn write_disk(
    writer: &CapsuleWriter,
    (index, disk): (usize, FileDevice),
    path: &Path,
    reporter: &ProgressReporter,
) -> Result<ImageRef, DaemonError> {
    let write = refs::store_error("write the image");
    let failed = |source| DaemonError::Disk { disk: path.display().to_string(), source };
    let cuts = first_alignment(&disk);
    let disk = aligned(Arc::new(disk), cuts.as_ref()).map_err(failed)?;
    let mut image = writer.image(None, disk.size() / PAGE_SIZE as u64).map_err(&write)?;
    let mut buffer = Vec::new();
    for run in PageRun::new(0, image.page_count()).chunks(EXTENT_PAGES as u64) {
        let extents =
            disk.extents(run.offset(), run.bytes() as u64).map_err(|source| failed(source.into()))?;
        // Holes are the zeros that an image has where nothing is put.
        if extents.iter().any(|extent| extent.kind == ExtentKind::Data) {
            buffer.resize(run.bytes(), 0);
            disk.read_at(run.offset(), &mut buffer).map_err(|source| failed(source.into()))?;
            image.put(run, &buffer).map_err(&write)?;
        }
        let done = run.offset() + run.bytes() as u64;
        reporter.progress("reading", Unit::Bytes, done, Some(disk.size()));
        if reporter.is_cancelled() {
            return Err(DaemonError::Cancelled { left: "nothing was imported".into() });
        }
    }
    let image = image.finish().map_err(&write)?;
    Ok(ImageRef { name: format!("disk{index}"), pages: image.pages, root: image.root, cuts })
}

/// Disks that become a capsule.
pub(crate) struct ImportedDisks<'a> {
    pub(crate) disks: Vec<FileDevice>,
    /// What errors call it.
    pub(crate) path: &'a Path,
    /// Tag of the capsule.
    pub(crate) name: &'a RefName,
    pub(crate) labels: BTreeMap<String, String>,
    /// What it boots with, if that is not on the disk.
    pub(crate) boot: Option<BootContent>,
}

/// A kernel, its initial RAM disk, and its command line.
pub(crate) struct BootContent {
    pub(crate) kernel: Vec<u8>,
    pub(crate) initrd: Vec<u8>,
    pub(crate) append: String,
}

impl BootContent {
    fn store(self, writer: &CapsuleWriter) -> whimbrel_store::Result<Boot> {
        let (kernel, initrd) = (writer.put_blob(&self.kernel)?, writer.put_blob(&self.initrd)?);
        Ok(Boot { kernel, initrd: Some(initrd), append: self.append })
    }
}

fn not_decrypted(path: &Path, source: io::Error) -> DaemonError {
    match source.kind() {
        io::ErrorKind::InvalidData => {
            DaemonError::invalid(format!("cannot decrypt {}: {source}", path.display()))
        }
        _ => DaemonError::io("read", path, source),
    }
}

fn write_raw(
    disk: &dyn Device,
    file: &File,
    path: &Path,
    reporter: &ProgressReporter,
) -> Result<(), DaemonError> {
    let io = |source| DaemonError::io("write", path, source);
    file.set_len(disk.size()).map_err(io)?;
    let mut buffer = Vec::new();
    for offset in (0..disk.size()).step_by(EXTENT_SIZE) {
        buffer.resize((disk.size() - offset).min(EXTENT_SIZE as u64) as usize, 0);
        disk.read_at(offset, &mut buffer).map_err(content_error)?;
        // Holes stay holes: the file is new and all zeros.
        if !whimbrel_core::is_zero(&buffer) {
            file.write_all_at(&buffer, offset).map_err(io)?;
        }
        reporter.progress("writing", Unit::Bytes, offset + buffer.len() as u64, Some(disk.size()));
        if reporter.is_cancelled() {
            return Err(DaemonError::Cancelled { left: "no file was written".into() });
        }
    }
    Ok(())
}

/// The error of an image that could not be read: the store's own where there is one.
fn content_error(error: BlockError) -> DaemonError {
    let action = "read the image";
    let BlockError::Content { source, .. } = error else {
        return DaemonError::Store { action, code: ErrorCode::Internal, source: error.into() };
    };
    match source.downcast::<StoreError>() {
        Ok(source) => refs::store_error(action)(*source),
        Err(source) => DaemonError::Store { action, code: ErrorCode::Internal, source },
    }
}

/// Converts between NBD and a new file: nothing that it parses comes from outside.
fn qemu_img(arguments: &[&str], target: &Path) -> Result<(), DaemonError> {
    let failed = |source: Box<dyn std::error::Error + Send + Sync>| DaemonError::Qemu {
        action: "convert the image",
        source,
    };
    let output = Command::new("qemu-img").args(arguments).arg(target).output();
    let output = output.map_err(|error| failed(error.into()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned().into()))
}

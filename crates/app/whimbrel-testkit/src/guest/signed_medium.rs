//! CD-ROM that boots the small guest with Secure Boot, as Debian's installer does: a boot loader that
//! Microsoft has signed, and a second one and a kernel that Debian has signed.
//!
//! Needs `apt-get update`, `dosfstools`, `mtools` and `xorriso`.

use super::{
    GuestError, GuestFiles, GuestOptions,
    artifact_cache::{once, run},
    boot_files::key,
    package,
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Packages with signed boot loaders, the file that is wanted of each, and its name on the medium.
const LOADERS: [(&str, &str, &str); 2] = [
    ("shim-signed", "shimx64.efi.signed", "BOOTX64.EFI"),
    ("grub-efi-amd64-signed", "gcdx64.efi.signed", "grubx64.efi"),
];
/// Bytes of the file system that UEFI reads, with room for both.
const EFI_BYTES: u64 = 8 << 20;
/// File by which the second boot loader finds the medium.
const MARK: &str = ".disk/info";

/// Returns the ISO file, built on the first use. Its guest has a buffer of 16 MiB and needs 512 MiB of
/// memory: with less, GRUB puts the kernel where it cannot start.
pub fn signed_medium() -> Result<PathBuf, GuestError> {
    let options = GuestOptions { buffer_mib: 16, ..GuestOptions::default() };
    // The kernel says that it was started with Secure Boot, and has the keys that signed its modules.
    let options: Vec<_> = options.to_string().split(' ').filter(is_kept).map(str::to_owned).collect();
    let options = options.join(" ") + " loglevel=1";
    let files = GuestFiles::get();
    let recipe = [options.clone().into_bytes(), include_bytes!("signed_medium.rs").to_vec()];
    let name = format!("signed-{}", key(&[&recipe[0], &recipe[1]])?);
    let place = once("guest-images", &name, |place| {
        let tree = place.join("tree");
        for folder in [".disk", "boot/grub"] {
            let folder = tree.join(folder);
            fs::create_dir_all(&folder).map_err(GuestError::file("create", &folder))?;
        }
        for (from, name) in [(&files.kernel, "vmlinuz"), (&files.initrd, "initrd")] {
            fs::copy(from, tree.join(name)).map_err(GuestError::file("copy", from))?;
        }
        let settings = format!(
            "serial --unit=0 --speed=115200\nterminal_output serial\nlinux /vmlinuz {options}\ninitrd /initrd\nboot\n"
        );
        for (path, text) in [(tree.join(MARK), "test"), (tree.join("boot/grub/grub.cfg"), &settings)] {
            fs::write(&path, text).map_err(GuestError::file("write", &path))?;
        }
        efi_part(&tree.join("boot/grub/efi.img"))?;
        let mut iso = Command::new("xorriso");
        iso.args(["-as", "mkisofs", "-quiet", "-R", "-e", "boot/grub/efi.img", "-no-emul-boot", "-o"]);
        run(iso.arg(place.join("medium.iso")).arg(&tree))?;
        fs::remove_dir_all(&tree).map_err(GuestError::file("remove", &tree))
    })?;
    Ok(place.join("medium.iso"))
}

fn is_kept(word: &&str) -> bool {
    *word != "quiet" && !word.contains("initcall_blacklist")
}

/// Creates the file system with the boot loaders.
fn efi_part(path: &Path) -> Result<(), GuestError> {
    let file = fs::File::create(path).and_then(|file| file.set_len(EFI_BYTES));
    file.map_err(GuestError::file("create", path))?;
    run(Command::new("mkfs.vfat").arg(path))?;
    run(Command::new("mmd").arg("-i").arg(path).args(["::EFI", "::EFI/BOOT"]))?;
    for (package, file, name) in LOADERS {
        let root = tempfile::tempdir().map_err(GuestError::file("create", std::env::temp_dir()))?;
        package::unpack(package, root.path())?;
        let loader = package::named(root.path(), file)?;
        run(Command::new("mcopy").arg("-i").arg(path).arg(loader).arg(format!("::EFI/BOOT/{name}")))?;
    }
    Ok(())
}

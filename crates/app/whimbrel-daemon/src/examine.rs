//! Examination of a data directory: what in it is damaged, missing or of a later version, and what to do.
//!
//! Writes nothing and needs no daemon, so it works beside one and when none starts. Every room reads its own
//! files; this module knows where they lie and what a person does about them.

use crate::{
    core::{directories::Directories, error::DaemonError},
    machine::folder,
    migrate::{history, source::pending_handovers},
    network::{managed, tunnel},
    protect::records,
    server::access::tokens,
    transfer::{bucket::records as bucket_records, pool::partial_records, upload},
};
use std::{
    error::Error,
    fs, io,
    path::{Path, PathBuf},
};
use whimbrel_core::{Digest, error_chain};
use whimbrel_store::FileKind;
use whimbrel_wire::{Identity, Trust, web_tls::ServerCertificate};

/// One file of a data directory that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFinding {
    /// Path of the file.
    pub path: PathBuf,
    /// Meaning of the file, like `record of a schedule`.
    pub what: &'static str,
    /// Reason why it cannot be used.
    pub reason: String,
    /// Consequence until then, and the next command.
    pub remedy: String,
}

/// Examines the data directory of a daemon.
pub fn examine(data: &Path) -> Vec<DataFinding> {
    let layout = Directories::of_data(data);
    let mut found = Findings(Vec::new());
    found.machines(&layout);
    found.store(&layout);
    found.keys(&layout);
    found.records(&layout);
    found.0
}

/// Sentence for a file that a backup has, or that can be moved away.
fn move_away(path: &Path, effect: &str) -> String {
    let path = path.display();
    format!("{effect}; restore the file, or `mv {path} {path}.damaged`, and restart the daemon")
}

struct Findings(Vec<DataFinding>);

impl Findings {
    fn note<E: ToString>(
        &mut self,
        path: &Path,
        what: &'static str,
        checked: Result<(), E>,
        remedy: impl FnOnce() -> String,
    ) {
        if let Err(reason) = checked {
            let (path, reason, remedy) = (path.to_owned(), reason.to_string(), remedy());
            self.0.push(DataFinding { path, what, reason, remedy });
        }
    }

    /// Paths in a folder; none if there is no such folder, and a finding if it cannot be read.
    fn paths(&mut self, folder: &Path) -> Vec<PathBuf> {
        let listed = fs::read_dir(folder).and_then(|entries| {
            entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()
        });
        match listed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                self.note(folder, "folder", Err(error), || "mend its file system or its mode".to_owned());
                Vec::new()
            }
            Ok(mut paths) => {
                paths.sort_unstable();
                paths
            }
        }
    }

    fn machines(&mut self, layout: &Directories) {
        for folder in self.paths(&layout.machines()).into_iter().filter(|path| path.is_dir()) {
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            match folder::check(&folder, &name) {
                Ok(()) => {}
                Err(DaemonError::CommitMark { path, to, source }) => {
                    self.note(&path, "mark of a handover", Err(source), || {
                        format!(
                            "{name} is not run: restore the file; or, if `whimbrel ps` on {to} has the machine, \
                             `whimbrel delete --unreadable {name}`; or else, if {to} discarded it, `rm {path} && \
                             truncate -s 4096 {path}` and restart the daemon",
                            path = path.display()
                        )
                    });
                }
                Err(error) => {
                    self.note(&folder.join("machine.json"), "record of a machine", Err(error_chain(&error)), || {
                        format!(
                            "nothing of {name} is touched and no garbage is collected; restore the file and restart \
                             the daemon, or `whimbrel delete --unreadable {name}`"
                        )
                    });
                }
            }
            for (path, error) in folder::check_disks(&folder) {
                self.note(&path, "disk of a machine", Err(error_chain(&error)), || {
                    format!("{name} does not start; restore the file, or `whimbrel resume` a capsule of it")
                });
            }
        }
        for path in self.paths(&layout.boot_dir()) {
            let named = path.file_name().and_then(|name| name.to_str()?.parse::<Digest>().ok());
            let Some(digest) = named else { continue };
            let checked = fs::read(&path).map_err(|error| error.to_string());
            let checked = checked.and_then(|content| match Digest::of(&content) == digest {
                true => Ok(()),
                false => Err("its content has another digest".to_owned()),
            });
            self.note(&path, "kernel or initial RAM disk", checked, || {
                "machines with it do not boot; restore the file, whose name is the BLAKE3 digest of its content"
                    .to_owned()
            });
        }
    }

    fn store(&mut self, layout: &Directories) {
        for finding in whimbrel_store::examine(&layout.store()) {
            let path = layout.store().join(&finding.file);
            let (what, remedy): (_, String) = match finding.kind {
                FileKind::Marker => (
                    "marker of the store",
                    "a damaged or missing one is made again by the daemon; a later version needs the program that \
                     wrote it"
                        .into(),
                ),
                FileKind::Keys => (
                    "wrapped key of the store",
                    "the daemon renews it from its copy; if both are lost, restore one of them".into(),
                ),
                FileKind::Ref => (
                    "name of a capsule",
                    "no garbage is collected; restore the file, or name a capsule again with `whimbrel tag`".into(),
                ),
                FileKind::Index => (
                    "index of the store",
                    "`whimbrel gc` rebuilds it from the packs, and so does the daemon when it starts".into(),
                ),
                FileKind::Pack => (
                    "pack of the store",
                    "restore the file; else `whimbrel verify` lists what is lost, and `whimbrel repair` gets it from \
                     other hosts or a pool"
                        .into(),
                ),
                FileKind::Condemned => ("state of garbage collection", "the daemon makes it again".into()),
                FileKind::Directory => ("folder of the store", "mend its file system or its mode".into()),
            };
            self.note(&path, what, Err(finding.reason), || remedy);
        }
    }

    fn keys(&mut self, layout: &Directories) {
        let dir = layout.key_dir();
        let key = dir.join("identity.key");
        if fs::symlink_metadata(&key).is_ok() {
            let checked = Identity::load_or_create(&dir).map(drop).map_err(|error| error_chain(&error));
            self.note(&key, "key of this host", checked, || {
                move_away(&key, "other hosts are neither called nor served; with a new key they must trust this host anew")
            });
        }
        let (chain, secret) = (dir.join("api.crt"), dir.join("api.key"));
        if [&chain, &secret].iter().any(|path| fs::symlink_metadata(path).is_ok()) {
            let checked = ServerCertificate::read(&chain, &secret).and_then(ServerCertificate::acceptor);
            let checked = checked.map(drop).map_err(|error| error_chain(&error));
            let path = if secret_is_readable(&secret) { &chain } else { &secret };
            self.note(path, "certificate of the API", checked, || {
                move_away(
                    path,
                    "the API is not served over TLS; with a new certificate clients must pin it anew",
                )
            });
        }
        let trust = layout.data().join("trust.toml");
        let checked = Trust::load(layout.data()).map(drop).map_err(|error| error_chain(&error));
        self.note(&trust, "trust list", checked, || {
            "no host is trusted; mend the text by hand, or restore the file".to_owned()
        });
    }

    fn records(&mut self, layout: &Directories) {
        let (handovers, uploads, tokens) = (layout.handovers(), layout.uploads(), layout.api_tokens());
        self.note(&handovers, "list of pending handovers", pending_handovers::check(&handovers), || {
            move_away(
                &handovers,
                "no machine leaves this host; without the file, `whimbrel resolve` on the targets",
            )
        });
        self.note(&uploads, "list of continuous uploads", upload::check(&uploads), || {
            move_away(
                &uploads,
                "nothing is uploaded; without the file, begin them anew with `whimbrel push --follow`",
            )
        });
        self.note(&tokens, "tokens of the API", tokens::check(&tokens), || {
            move_away(
                &tokens,
                "no token is accepted; without the file, `whimbrel token create` makes new ones",
            )
        });
        self.each(&layout.schedules(), "record of a schedule", whimbrel_schedule::check_file, |path| {
            move_away(
                path,
                "the schedule does not run; without the file, `whimbrel schedule create` makes it anew",
            )
        });
        self.each(&layout.networks(), "record of a network", managed::check_file, |path| {
            move_away(path, "the network stays as it is set up and cannot be changed")
        });
        self.each(&layout.tunnels(), "record of a tunnel", text_of(tunnel::records::check), |path| {
            move_away(path, "the machine that is away has no tunnel to its network here")
        });
        self.each(&layout.protections(), "record of a protection", text_of(records::check), |path| {
            move_away(path, "its machine does not run here; move the file away only if no other host runs it")
        });
        for path in self.paths(&layout.leases()) {
            let checked = records::check(&path).map_err(|error| error_chain(&error));
            self.note(&path, "decision of a witness", checked, || {
                move_away(
                    &path,
                    "both hosts of the protection wait; move it away only if one of them runs the machine",
                )
            });
        }
        self.each(&layout.migrations(), "record of a past migration", text_of(history::check), |path| {
            move_away(path, "the migration is not listed")
        });
        let buckets = layout.buckets();
        self.note(&buckets, "places of partial capsules in buckets", bucket_records::check(&buckets), || {
            move_away(
                &buckets,
                "their missing pages are not fetched; without the file, pull the capsules again",
            )
        });
        let pooled = |path: &Path| partial_records::check(path).map_err(|error| error.to_string());
        for path in self.paths(&layout.partial_capsules()) {
            self.note(&path, "place of a partial capsule in a pool", pooled(&path), || {
                move_away(
                    &path,
                    "its missing pages are not fetched; without the file, pull the capsule again",
                )
            });
        }
    }

    /// Checks each JSON file of a folder.
    fn each(
        &mut self,
        folder: &Path,
        what: &'static str,
        check: impl Fn(&Path) -> Result<(), String>,
        remedy: impl Fn(&Path) -> String,
    ) {
        for path in self.paths(folder) {
            if path.extension().is_some_and(|ending| ending == "json") {
                self.note(&path, what, check(&path), || remedy(&path));
            }
        }
    }
}

fn text_of(check: impl Fn(&Path) -> io::Result<()>) -> impl Fn(&Path) -> Result<(), String> {
    move |path| check(path).map_err(|error| error_chain(&error as &(dyn Error + 'static)))
}

/// Whether the secret of the certificate is a text at all: if it is, the certificate is looked at first.
fn secret_is_readable(path: &Path) -> bool {
    fs::read_to_string(path).is_ok_and(|text| text.trim_end().ends_with("-----"))
}

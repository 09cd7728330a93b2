"""Types of the API. Written by generate.py from docs/openapi.json; change those."""

from __future__ import annotations

from typing import Literal, TypedDict, Union

from typing_extensions import NotRequired

#: Order in which a machine tries what it can boot from.
BootOrder = Literal["disk", "cdrom"]

#: A tag, a machine (its newest capsule), an id or its first digits, or NAME@-AGE (like web@-5m):
#: the newest epoch snapshot of a protected machine that is at least of this age
CapsuleRef = str

#: Network of clones.
CloneNetwork = Literal["isolated", "same"]

#: Kind of a failure. Programs may branch on it, because its meaning never changes.
ErrorCode = Literal[
    "not_found",
    "name_taken",
    "invalid",
    "busy",
    "unreachable",
    "untrusted",
    "unauthenticated",
    "forbidden",
    "rate_limited",
    "damaged",
    "no_space",
    "qemu_failed",
    "unsupported",
    "cancelled",
    "internal",
]

#: Content of an exported file.
ExportFormat = Literal["capsule", "raw", "qcow2"]

#: Decision of a person about a machine between two hosts, one of which is lost.
HandoverDecision = Literal["run-here", "discard"]

#: Content of an imported file.
ImportFormat = Literal["capsule", "disk"]

#: Mode of a migration.
MigrateMode = Literal["live", "stop", "lazy", "hybrid"]

#: Id of a migration: eight hexadecimal digits.
MigrationId = str

#: Network of a machine after a migration or a resume.
MoveNetwork = Literal["local", "home"]

#: 1 to 63 letters, digits, '-', '_' or '.'; the first is a letter or a digit
Name = str

#: Number of an operation, unique while the daemon runs.
OperationId = int

#: Kind of an operation.
OperationKind = Literal[
    "checkpoint",
    "suspend",
    "rewind",
    "resume",
    "clone",
    "migrate",
    "evacuate",
    "protect",
    "failover",
    "gc",
    "verify",
    "repair",
    "seal",
    "export",
    "import",
    "pull",
    "push",
    "bucket",
    "cache",
]

#: Transport protocol of a published port.
PortProtocol = Literal["tcp", "udp"]

#: Hardware of a machine.
Profile = Literal["default", "uefi", "desktop", "micro", "foreign"]

#: Unit in which changes are found.
ProtectBlock = Literal["64", "128", "256", "page"]

#: Mode of a protection.
ProtectMode = Literal["epoch", "remus", "replay"]

#: Side of a protection.
ProtectRole = Literal["primary", "standby"]

#: Ends after which a machine is restarted.
RestartPolicy = Literal["no", "on-failure", "always"]

#: Time at which the pages of a resumed machine are loaded.
ResumeMode = Literal["lazy", "full"]

#: What a user of the API may do. Each role includes those before it.
Role = Literal["viewer", "operator", "admin"]

#: Reason to pause the machine for the last round of a migration.
RoundsEnd = Literal["little_left", "within_downtime", "rate_above_max", "plateau", "rounds_over"]

#: Way to stop a machine.
StopMode = Literal["powerdown", "kill"]

#: Attributes, each with = != >= <= > or < and a value, separated by commas: ram>=512M,os=debian.
#: `ram`, `disk` and `cpus` are those of the machine, all others are labels
Terms = str

#: Unit of the progress of an operation.
Unit = Literal["bytes", "pages", "items"]


class ApiError(TypedDict):
    """Body of every failed request, and error of a failed operation."""

    #: Causes, outermost first; none repeats the one before it.
    causes: NotRequired[list[str]]
    #: Kind of the failure.
    code: ErrorCode
    #: Remedy, with the next command if there is one.
    hint: NotRequired[str | None]
    #: Message of one line, in lower case, without a full stop.
    message: str


class Attributes(TypedDict):
    """Attributes of a capsule."""

    #: Whether the capsule resumes instead of booting.
    active: bool
    #: Attribute `cpus`: number of virtual CPUs.
    cpus: int
    #: Attribute `disk`: size of all disks, zeros included.
    disk: int
    #: Labels, each an attribute of its own name.
    labels: dict[str, str]
    #: Attribute `ram`: size of the guest memory.
    ram: int
    #: Time at which the capsule was taken.
    time_ms: int


class AutostartOff(TypedDict):
    """Do not start the machine."""

    kind: Literal["off"]


class AutostartOn(TypedDict):
    """Start the machine after the host has started."""

    #: Seconds to wait after its start before the next machine is started.
    delay_s: NotRequired[int]
    kind: Literal["on"]
    #: Place among the machines of the host: the lowest number starts first.
    order: NotRequired[int]


class BalloonRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/balloon`."""

    #: Memory that the guest may use from now on.
    size: int


class BalloonTargetOff(TypedDict):
    """Do not shrink the memory."""

    kind: Literal["off"]


class BalloonTargetAuto(TypedDict):
    """Shrink until the guest would swap, or can release little more."""

    kind: Literal["auto"]


class BalloonTargetTo(TypedDict):
    """Shrink to a size."""

    kind: Literal["to"]
    #: Memory that the guest still has.
    size: int


class BucketCapsule(TypedDict):
    """Capsule in a bucket."""

    #: Digest of the manifest.
    id: str
    #: Name of the capsule there.
    name: Name
    #: Size of memory and disks.
    size: int
    #: Time at which the capsule was taken.
    time_ms: int


class BucketRequest(TypedDict):
    """Body of `POST /v1/buckets`: list the capsules of a bucket, after something was removed there
    if requested.
    """

    #: Location of the store, as `s3://BUCKET[/PREFIX][?endpoint=URL]`.
    bucket: str
    #: Delete objects that no name needs, and no host that runs a machine from there.
    gc: NotRequired[bool]
    untag: NotRequired[Name | None]
    #: Read everything there and check its digests.
    verify: NotRequired[bool]


class CacheAddRequest(TypedDict):
    """Body of `POST /v1/cache`: index the pages of a file, so that transfers can skip them."""

    #: Remove the file from the cache.
    forget: NotRequired[bool]
    machine: NotRequired[Name | None]
    #: Absolute path of a disk image (raw or qcow2) or of any other file on the host.
    path: NotRequired[str | None]


class CacheInfo(TypedDict):
    """State of the hash cache."""

    #: Number of entries that were evicted.
    evictions: int
    #: Number of entries.
    slots: int
    #: Files that are indexed.
    sources: list[CacheSource]
    #: Size of the table.
    table: int
    #: Number of used entries.
    used: int


class CacheSource(TypedDict):
    """File that is indexed in the hash cache."""

    #: Number of entries that were wrong because the file had changed.
    dropped: int
    #: Number of pages that were read from it.
    hits: int
    #: Kind of the file: `raw`, `qcow2` or `memory`.
    kind: str
    #: Number of its pages in the cache after the last scan.
    pages: int
    #: Path of the file.
    path: str


class CallerInfo(TypedDict):
    """Sender of a request, and the calls that it may make."""

    #: Calls that are allowed, as `POST /v1/machines/{name}/stop`. What a call names is judged
    #: beside that.
    calls: list[str]
    #: Tags that the token is for.
    capsules: NotRequired[list[str] | None]
    #: Time at which the token expires.
    expires_ms: NotRequired[int | None]
    #: Machines that the token is for; with neither list, everything is.
    machines: NotRequired[list[str] | None]
    #: `token NAME` or `user NAME`.
    name: str
    #: What the caller may do.
    role: Role


class CapsuleDiff(TypedDict):
    """Differences between two capsules."""

    #: Id of the first capsule.
    a: str
    #: Id of the second capsule.
    b: str
    #: Differences of the configuration.
    config: list[ConfigChange]
    #: Differences of all page arrays of both.
    images: list[ImageDiff]


class CapsuleInfo(TypedDict):
    """Description of a capsule."""

    #: Whether the capsule has memory and device state, so that it resumes instead of booting.
    active: bool
    #: Host on which the capsule was taken.
    host: Name
    #: Digest of the manifest.
    id: str
    #: Images of the page arrays `memory`, `disk0`, …
    images: list[ImageInfo]
    #: Labels that the user gave.
    labels: dict[str, str]
    #: Machine that the capsule was taken from.
    machine: Name
    #: Memory size of the machine.
    memory: int
    #: Refs of the capsule: tags, and the machine whose newest capsule it is.
    names: list[Name]
    #: Parents; none for the first capsule of a machine.
    parents: list[str]
    #: Time at which the capsule was taken.
    time_ms: int
    #: Whether the capsule is complete. Other hosts have the missing objects of a partial capsule.
    whole: NotRequired[bool]


class CaptureReport(TypedDict):
    """Cost of a capsule."""

    #: Memory that the guest released through its balloon, if that was requested.
    balloon_freed: NotRequired[int | None]
    #: Bytes that were added to the store.
    bytes_added: int
    #: Id of the new capsule.
    capsule: str
    #: Time for which the machine was paused; for a suspend, until the capsule was durable.
    pause_ms: float
    #: Rounds; the machine was paused during the last one.
    rounds: list[RoundInfo]
    #: Time from the request until the capsule was durable.
    total_ms: float


class CheckpointRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/checkpoint`."""

    #: Shrinking of guest memory before the capsule is taken.
    balloon: NotRequired[BalloonTarget]
    #: Take a disk-only capsule, with all disks as of one instant. The machine may be switched off.
    disks_only: NotRequired[bool]
    #: Labels for the new capsule.
    labels: NotRequired[dict[str, str]]
    #: Have qemu-ga freeze the guest's file systems for the pause; for disk-only capsules.
    quiesce: NotRequired[bool]
    tag: NotRequired[Name | None]


class CloneRequest(TypedDict):
    """Body of `POST /v1/clone`."""

    #: Capsule to clone.
    capsule: CapsuleRef
    #: Number of clones, at least 1.
    count: int
    #: Time at which pages are loaded.
    mode: NotRequired[ResumeMode]
    #: Network of the clones.
    network: NotRequired[CloneNetwork]
    prefix: NotRequired[Name | None]


class CloudInit(TypedDict):
    """Settings that cloud-init reads at the first boot, from a disk of the machine's own."""

    address: NotRequired[StaticAddress | None]
    #: Host name, as RFC 1123 has them [default: the name of the machine].
    hostname: NotRequired[str | None]
    #: Network configuration, version 1 or 2 [default: DHCP].
    network_config: NotRequired[str | None]
    #: Public SSH keys that may log in as the image's own user.
    ssh_keys: NotRequired[list[str]]
    #: User data: `#cloud-config`, a script, or MIME parts.
    user_data: NotRequired[str | None]


class ConfigChange(TypedDict):
    """Setting of a machine that differs between two capsules, as text."""

    #: Value in the first capsule; none if it is absent there.
    a: NotRequired[str | None]
    #: Value in the second capsule; none if it is absent there.
    b: NotRequired[str | None]
    #: Name of the setting: `memory`, `cpus`, `disks[1].size`, …
    field: str


class CpuBaseline(TypedDict):
    """CPU model that hosts have in common."""

    #: Features that all hosts have.
    features: list[str]
    #: The hosts, this one first.
    hosts: list[CpuHost]
    #: The model, as `cpu` of `POST /v1/machines` takes it.
    model: str


class CpuBaselineRequest(TypedDict):
    """Body of `POST /v1/cpu/baseline`: the CPU model that hosts have in common."""

    #: Trusted hosts to compare with this one.
    hosts: NotRequired[list[Name]]


class CpuHost(TypedDict):
    """Processor of a host, as its QEMU gives it to guests."""

    #: Executor of guest instructions.
    accel: str
    #: Features that another host of the group has and this one does not.
    lacks: NotRequired[list[str]]
    #: Name of the host.
    name: Name
    #: Version of its QEMU.
    qemu_version: str


class Damage(TypedDict):
    """Damage in the store."""

    #: Pack, index or capsule with the damage, as the store names it.
    place: str
    #: Description of the damage.
    problem: str


class DeriveRequest(TypedDict):
    """Body of `POST /v1/derive`: a new machine that boots from the disks of a capsule."""

    #: Command line of the kernel, if the parent loads one directly [default: that of the parent].
    append: NotRequired[str | None]
    #: Parent, of which only the disks and the configuration are used.
    capsule: CapsuleRef
    cloud_init: NotRequired[CloudInit | None]
    #: CPU model, as for a new machine [default: that of the parent].
    cpu: NotRequired[str | None]
    #: Number of virtual CPUs [default: that of the parent].
    cpus: NotRequired[int | None]
    #: Size of the first disk, if larger than that of the parent; the rest reads as zeros.
    disk_size: NotRequired[int | None]
    #: Whether it gets a screen, a keyboard and a pointer if its parent has none.
    display: NotRequired[bool]
    #: Size of the guest memory [default: that of the parent].
    memory: NotRequired[int | None]
    #: Name for the machine, not in use on this host.
    name: Name
    #: Network ports [default: those of the parent with new hardware addresses].
    nics: NotRequired[list[NicRequest] | None]
    profile: NotRequired[Profile | None]
    #: Ports of the host that lead to the machine, which needs a port in a managed network.
    publish: NotRequired[list[PortRequest]]
    #: Whether it starts only programs that are signed, if the profile gives it UEFI [default: as
    #: the profile].
    secure_boot: NotRequired[bool | None]
    #: Settings on this host.
    settings: NotRequired[MachineSettings]
    #: Whether it gets a TPM 2.0 if its parent has none. The TPM of a parent stays, with what is in
    #: it.
    tpm: NotRequired[bool]


class DirtyTraceRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/wws`: sample the dirty pages of a machine.  The answer is a
    dirty trace that grows until the time has passed, the caller disconnects, or the machine has
    left the host.
    """

    #: Milliseconds to sample, at most a day [default: 8000].
    duration_ms: NotRequired[int | None]
    #: Milliseconds between two samples, 10 to 10,000 [default: 50].
    sample_ms: NotRequired[int | None]


class DiskInfo(TypedDict):
    """Description of a disk."""

    #: Base of the disk: a path, or the id of a capsule.
    base: str
    #: Whether it is the medium of a CD-ROM drive.
    cdrom: NotRequired[bool]
    #: Bytes of allocated pages in the overlay.
    owned: int
    #: Size of the virtual disk.
    size: int


class DiskRebase(TypedDict):
    """Changes of a disk since the old version by the child and by the new version, in pages of 4
    KiB.
    """

    #: Pages that the child changed.
    changed: int
    #: First conflicts, as runs of pages (start, length).
    conflict_runs: list[list[int]]
    #: Pages that both changed to different content; for a machine, all that both changed.
    conflicts: int
    #: Name of the disk: `disk0`, …
    name: str
    #: Pages that the new version changed.
    updated: int


class DiskSize(TypedDict):
    """Size that a disk gets."""

    #: Index of the disk, from 0.
    disk: int
    #: Size of the disk, at least that which it has.
    size: int


class DiskSource(TypedDict):
    """File that a new disk starts from."""

    #: Absolute path of a raw image on the host.
    path: str
    #: Size of the virtual disk, if larger than the file; the rest reads as zeros.
    size: NotRequired[int | None]


class DowntimeInfo(TypedDict):
    """Parts of a downtime in milliseconds, in their order."""

    #: Time to record the handover durably, which is the commit point.
    commit_ms: float
    #: Time to save the state of CPUs and devices, while pages are sent.
    devices_ms: float
    #: Time to send that state, and to receive the answer.
    link_ms: float
    #: Time to load that state on the target and to make the disks durable there.
    load_ms: float
    #: Time to send the last pages, at the same time.
    pages_ms: float
    #: Time to find the pages that were left.
    scan_ms: float
    #: Time to notify the target and to start the CPUs.
    start_ms: float
    #: Time until the CPUs were stopped.
    stop_ms: float


class EpochPauseParts(TypedDict):
    """Parts of the pause of an epoch, in milliseconds."""

    #: Time to copy the dirty pages.
    copy_ms: float
    #: Time to wait for the device state after that. It is saved in parallel.
    devices_ms: float
    #: Time until the CPUs ran again.
    go_on_ms: float
    #: Time to find the dirty pages.
    scan_ms: float
    #: Time until the CPUs were stopped.
    stop_ms: float


class EvacuateReport(TypedDict):
    """Result of an evacuation."""

    #: Whether this was a dry run.
    dry_run: bool
    #: Whether no machine runs on the host any more; for a dry run, whether none would.
    empty: bool
    #: Machines in the order of their migrations, then those that stay.
    machines: list[EvacuatedMachine]
    #: Number of machines that still run there because the asking host may not read and write them.
    withheld: NotRequired[int]


class EvacuateRequest(TypedDict):
    """Body of `POST /v1/evacuate`: migrate every machine that runs on a host to other hosts, those
    that write least first.
    """

    #: Move nothing, and report where each machine would go.
    dry_run: NotRequired[bool]
    host: NotRequired[Name | None]
    #: Machines that migrate at the same time, 1 to 16 [default: 1].
    parallel: NotRequired[int | None]
    #: Limit for the rate of each migration, in bytes per second.
    rate_max: NotRequired[int | None]
    #: Milliseconds to sample the dirty pages, which decide the order, 10 to 60,000 [default: 1000].
    sample_ms: NotRequired[int | None]
    #: Start no further migration after one has failed.
    stop_on_failure: NotRequired[bool]
    #: Targets, by the names that the host to empty has for them; if empty, every host that it
    #: trusts and reaches.
    to: NotRequired[list[Name]]


class EvacuatedMachine(TypedDict):
    """Machine of a host that is evacuated."""

    #: Pages that it dirtied during the sample; none if it was not sampled.
    dirtied_pages: NotRequired[int | None]
    host: NotRequired[Name | None]
    #: Size of the guest memory.
    memory: int
    #: Name of the machine.
    name: Name
    #: Outcome for the machine.
    outcome: MoveOutcome


class EventKindMachine(TypedDict):
    """State of a machine has changed; the text is the new state."""

    kind: Literal["machine"]


class EventKindMachineRemoved(TypedDict):
    """Machine is gone from this host."""

    kind: Literal["machine_removed"]


class EventKindSettings(TypedDict):
    """Settings of a machine were changed."""

    kind: Literal["settings"]


class EventKindTakeover(TypedDict):
    """Machine was taken over from another host."""

    kind: Literal["takeover"]


class EventKindSelfStart(TypedDict):
    """Machine was started by itself, or could not be."""

    kind: Literal["self_start"]


class EventKindSchedule(TypedDict):
    """Run of a schedule has ended; the text is its outcome."""

    kind: Literal["schedule"]


class EventKindOperationStarted(TypedDict):
    """Operation has begun."""

    kind: Literal["operation_started"]
    #: Kind of the operation.
    operation: OperationKind


class EventKindOperationEnded(TypedDict):
    """Operation has ended; the text is its outcome."""

    kind: Literal["operation_ended"]
    #: Kind of the operation.
    operation: OperationKind


class EventKindMissed(TypedDict):
    """Earlier events that the caller does not know are no longer known."""

    kind: Literal["missed"]


class ExecRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/exec`. The answer comes when the program has ended."""

    #: Program of the guest and its arguments; no shell reads them.
    command: list[str]
    #: Environment, as `NAME=VALUE` [default: that of qemu-ga].
    env: NotRequired[list[str]]
    #: Input of the program, in Base64.
    input: NotRequired[str]
    #: Seconds to wait for its end, at most an hour [default: 60]. After that the request fails, and
    #: the program runs on.
    timeout_s: NotRequired[int | None]


class ExecResult(TypedDict):
    """End of a program in a guest."""

    #: Exit code, if it ended by itself.
    exit_code: NotRequired[int | None]
    #: Signal that ended it.
    signal: NotRequired[int | None]
    #: Error output, in Base64.
    stderr: str
    #: Output, in Base64.
    stdout: str
    #: Whether output is missing, because it was longer than the 16 MiB that qemu-ga keeps.
    truncated: NotRequired[bool]


class ExportRequest(TypedDict):
    """Body of `POST /v1/export`."""

    #: Capsule to export.
    capsule: CapsuleRef
    #: Content of the file.
    format: ExportFormat
    #: Page array to write as `raw` or `qcow2` [default: the first disk].
    image: NotRequired[str | None]
    #: Key to encrypt a capsule with: 64 hexadecimal digits [default: it is not encrypted].
    key: NotRequired[str | None]
    #: Absolute path of the file to create on the host. It must not exist.
    path: str


class FailoverRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/failover`."""

    #: Take over although the host of the primary answers: whatever runs there is stopped later.
    force: NotRequired[bool]
    #: Confirmation, on a standby without a witness, that the primary no longer runs the machine.
    primary_is_dead: NotRequired[bool]


class FileContent(TypedDict):
    """Part of a file in a guest."""

    #: Bytes, in Base64.
    data: str
    #: Whether the file ends after them.
    end: bool


class FileReadRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/files/read`: a part of a file in the guest."""

    #: Most bytes, up to 512 KiB.
    length: int
    #: Place of the first byte to read.
    offset: NotRequired[int]
    #: Path in the guest.
    path: str


class FileWriteRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/files/write`: a part of a file in the guest. The one at the
    beginning creates the file, or empties it.
    """

    #: Bytes in Base64, up to 512 KiB.
    data: str
    #: Place of the first byte.
    offset: NotRequired[int]
    #: Path in the guest.
    path: str


class GoldenMatch(TypedDict):
    """Golden capsule that fits best."""

    #: Attributes of the capsule.
    attributes: Attributes
    #: Digest of the manifest.
    capsule: str
    host: NotRequired[Name | None]
    #: Tag of the capsule there.
    name: Name


class GraphNode(TypedDict):
    """Capsule in the tree of capsules."""

    #: Bytes of distinct pages that its nearest parent does not have, before compression. Without a
    #: parent in the store all pages count. None for a partial capsule.
    adds: NotRequired[int | None]
    #: Children in this store, oldest first.
    children: list[str]
    #: Machines of this host whose next capsule will be a child of this one.
    machines: list[MachineOnCapsule]
    #: Parents in this store, or else the capsule that its machine was derived from.
    under: list[str]
    #: Whether the capsule has memory and device state, so that it resumes instead of booting.
    active: bool
    #: Host on which the capsule was taken.
    host: Name
    #: Digest of the manifest.
    id: str
    #: Images of the page arrays `memory`, `disk0`, …
    images: list[ImageInfo]
    #: Labels that the user gave.
    labels: dict[str, str]
    #: Machine that the capsule was taken from.
    machine: Name
    #: Memory size of the machine.
    memory: int
    #: Refs of the capsule: tags, and the machine whose newest capsule it is.
    names: list[Name]
    #: Parents; none for the first capsule of a machine.
    parents: list[str]
    #: Time at which the capsule was taken.
    time_ms: int
    #: Whether the capsule is complete. Other hosts have the missing objects of a partial capsule.
    whole: NotRequired[bool]


class HardwareChange(TypedDict):
    """Other hardware of a machine: what is absent stays as it is. One that runs gets and loses
    disks and network ports, of which it can lose the last that it got while it ran; all else
    needs one that is stopped or crashed.
    """

    #: Absolute paths of media for CD-ROM drives to add, on the host.
    add_cdroms: NotRequired[list[str]]
    #: Sizes of empty disks to add after those that it has.
    add_disks: NotRequired[list[int]]
    #: Network ports to add after those that it has.
    add_nics: NotRequired[list[NicRequest]]
    boot_order: NotRequired[BootOrder | None]
    #: CPU model, as of a new machine.
    cpu: NotRequired[str | None]
    #: Number of virtual CPUs.
    cpus: NotRequired[int | None]
    #: Kind of its disks and network ports.
    devices: NotRequired[str | None]
    #: Disks that become larger; what is added reads as zeros.
    disk_sizes: NotRequired[list[DiskSize]]
    #: Whether it has a screen, a keyboard and a pointer.
    display: NotRequired[bool | None]
    #: Whether all CD-ROM drives are taken away. Those of a machine that runs stay, and each gets
    #: another of the media in `add_cdroms`.
    eject: NotRequired[bool]
    #: Size of the guest memory, a multiple of 1 MiB.
    memory: NotRequired[int | None]
    #: Index of the last disk, which is removed with all that is on it.
    remove_disk: NotRequired[int | None]
    #: Hardware addresses of network ports to remove.
    remove_nics: NotRequired[list[str]]


class HostEventMachine(TypedDict):
    """Something that happened on the host."""

    #: Number of the event. Later events have greater numbers, also after a restart of the daemon.
    number: int
    #: Name of the machine, capsule or schedule that it is about; empty for the host.
    subject: str
    #: Details in words.
    text: NotRequired[str]
    #: Time of the event.
    time_ms: int
    kind: Literal["machine"]


class HostEventMachineRemoved(TypedDict):
    """Something that happened on the host."""

    #: Number of the event. Later events have greater numbers, also after a restart of the daemon.
    number: int
    #: Name of the machine, capsule or schedule that it is about; empty for the host.
    subject: str
    #: Details in words.
    text: NotRequired[str]
    #: Time of the event.
    time_ms: int
    kind: Literal["machine_removed"]


class HostEventSettings(TypedDict):
    """Something that happened on the host."""

    #: Number of the event. Later events have greater numbers, also after a restart of the daemon.
    number: int
    #: Name of the machine, capsule or schedule that it is about; empty for the host.
    subject: str
    #: Details in words.
    text: NotRequired[str]
    #: Time of the event.
    time_ms: int
    kind: Literal["settings"]


class HostEventTakeover(TypedDict):
    """Something that happened on the host."""

    #: Number of the event. Later events have greater numbers, also after a restart of the daemon.
    number: int
    #: Name of the machine, capsule or schedule that it is about; empty for the host.
    subject: str
    #: Details in words.
    text: NotRequired[str]
    #: Time of the event.
    time_ms: int
    kind: Literal["takeover"]


class HostEventSelfStart(TypedDict):
    """Something that happened on the host."""

    #: Number of the event. Later events have greater numbers, also after a restart of the daemon.
    number: int
    #: Name of the machine, capsule or schedule that it is about; empty for the host.
    subject: str
    #: Details in words.
    text: NotRequired[str]
    #: Time of the event.
    time_ms: int
    kind: Literal["self_start"]


class HostEventSchedule(TypedDict):
    """Something that happened on the host."""

    #: Number of the event. Later events have greater numbers, also after a restart of the daemon.
    number: int
    #: Name of the machine, capsule or schedule that it is about; empty for the host.
    subject: str
    #: Details in words.
    text: NotRequired[str]
    #: Time of the event.
    time_ms: int
    kind: Literal["schedule"]


class HostEventOperationStarted(TypedDict):
    """Something that happened on the host."""

    #: Number of the event. Later events have greater numbers, also after a restart of the daemon.
    number: int
    #: Name of the machine, capsule or schedule that it is about; empty for the host.
    subject: str
    #: Details in words.
    text: NotRequired[str]
    #: Time of the event.
    time_ms: int
    kind: Literal["operation_started"]
    #: Kind of the operation.
    operation: OperationKind


class HostEventOperationEnded(TypedDict):
    """Something that happened on the host."""

    #: Number of the event. Later events have greater numbers, also after a restart of the daemon.
    number: int
    #: Name of the machine, capsule or schedule that it is about; empty for the host.
    subject: str
    #: Details in words.
    text: NotRequired[str]
    #: Time of the event.
    time_ms: int
    kind: Literal["operation_ended"]
    #: Kind of the operation.
    operation: OperationKind


class HostEventMissed(TypedDict):
    """Something that happened on the host."""

    #: Number of the event. Later events have greater numbers, also after a restart of the daemon.
    number: int
    #: Name of the machine, capsule or schedule that it is about; empty for the host.
    subject: str
    #: Details in words.
    text: NotRequired[str]
    #: Time of the event.
    time_ms: int
    kind: Literal["missed"]


class HostInfo(TypedDict):
    """Answer of `GET /v1/host`."""

    #: Default executor of guest instructions.
    accel: str
    #: Directory with the store and the machines.
    data: str
    #: Address for other hosts; none if they cannot connect.
    listen: NotRequired[str | None]
    #: Number of machines.
    machines: int
    memory: NotRequired[HostMemory | None]
    #: Name of the host, by which other hosts trust it.
    name: Name
    #: Process id of the daemon.
    pid: int
    #: Public ed25519 key, in the form that `whimbrel trust add` reads.
    public_key: str
    #: Version of QEMU; none if it is not installed.
    qemu_version: NotRequired[str | None]
    #: Usage of the store.
    store: StoreUsage
    #: Seconds since the daemon started.
    uptime_s: int
    #: Version of the daemon.
    version: str


class HostMachines(TypedDict):
    """Host with its machines. Also the answer of `GET /v1/hosts`, of which the first is the host
    that was asked.
    """

    #: Why another host has not answered.
    failure: NotRequired[str | None]
    #: Machines of the host; of another one those whose capsules the asked host may read.
    machines: list[MachineInfo]
    memory: NotRequired[HostMemory | None]
    #: Name of the host.
    name: Name


class HostMemory(TypedDict):
    """Memory of a host."""

    #: What is left for new machines: neither used nor promised to a machine.
    spare: int
    #: All memory of the host.
    total: int


class HostPort(TypedDict):
    """A port of the host."""

    #: Number of the port.
    port: int
    #: Protocol of the port.
    protocol: NotRequired[PortProtocol]


class ImageDiff(TypedDict):
    """Differences between two versions of a page array."""

    #: Pages whose content differs.
    changed: int
    #: Name of the page array: `memory`, `disk0`, …
    name: str
    #: Changed pages whose content the first capsule does not have anywhere.
    new_contents: int
    #: Pages in the first capsule; 0 if it has no such array.
    pages_a: int
    #: Pages in the second capsule; 0 if it has no such array.
    pages_b: int


class ImageInfo(TypedDict):
    """Image of one page array of a capsule."""

    #: Name of the page array: `memory`, `disk0`, …
    name: str
    #: Length in pages of 4 KiB, including zero pages. An aligned disk has some more pages than its
    #: size.
    pages: int
    #: Root digest of the image.
    root: str
    #: Size of the memory or disk.
    size: int


class ImageOffer(TypedDict):
    """Image that a source of this host offers."""

    #: Checksum of the file, as `sha256:` or `sha512:` and digits.
    checksum: str
    #: Where its file is.
    location: str
    #: Name of the image.
    name: str
    #: Length of the file, if the source says it.
    size: NotRequired[int | None]
    #: User that cloud-init makes in it, if the source says it.
    user: NotRequired[str | None]


class ImageOffers(TypedDict):
    """Images that the sources of a host offer."""

    #: The images, by name.
    images: list[ImageOffer]
    #: Sources that could not be read, each with the reason.
    problems: NotRequired[list[str]]


class ImagePullRequest(TypedDict):
    """Body of `POST /v1/images`: fetches an image from a source. If the one that is here was made
    of the same file, nothing is fetched.
    """

    #: Name of the image at its source, and here.
    name: str


class ImportRequest(TypedDict):
    """Body of `POST /v1/import`."""

    #: Content of the file. A disk becomes a disk-only capsule.
    format: ImportFormat
    #: Key of an encrypted capsule.
    key: NotRequired[str | None]
    #: Tag for the new capsule.
    name: Name
    #: Absolute path of the file on the host.
    path: str


class KeyChangeRequest(TypedDict):
    """Request for another master key."""

    #: File of the host with the new key: 64 hexadecimal digits, for its owner only.
    key_file: str


class MachineInfo(TypedDict):
    """Description of a machine."""

    #: Executor of guest instructions.
    accel: str
    #: Number of virtual CPUs.
    cpus: int
    #: Disks, in the order of their device ids.
    disks: list[DiskInfo]
    #: Whether it has a screen, a keyboard and a pointer.
    display: NotRequired[bool]
    #: Schedules for it whose last runs failed, with the causes.
    failed_care: NotRequired[list[str]]
    #: Parent of its next capsule: the last one taken from it, or the one that it was made from.
    follows: NotRequired[str | None]
    #: Size of the guest memory.
    memory: int
    #: Name of the machine on this host.
    name: Name
    #: Network ports, in the order of their device ids.
    nics: list[NicInfo]
    operation: NotRequired[OperationId | None]
    #: Capsule that it was resumed or cloned from.
    origin: NotRequired[str | None]
    #: Process id of the QEMU process, if there is one.
    pid: NotRequired[int | None]
    process: NotRequired[MachineProcess | None]
    protection: NotRequired[ProtectionInfo | None]
    restarts: NotRequired[RestartInfo | None]
    #: Settings on this host.
    settings: NotRequired[MachineSettings]
    #: Time at which the machine got into this state.
    since_ms: int
    #: Current state of the machine.
    state: MachineState
    taken_over: NotRequired[TakeoverInfo | None]
    tunnel: NotRequired[TunnelInfo | None]
    uploads: NotRequired[Uploads | None]
    #: Generation id (a UUID), new for every clone and resume.
    vmgenid: NotRequired[str | None]


class MachineOnCapsule(TypedDict):
    """Machine that is based on a capsule."""

    #: Whether it has a QEMU process.
    live: bool
    #: Name of the machine.
    name: Name


class MachineProcess(TypedDict):
    """Process that serves one machine."""

    #: Process id on the host.
    pid: int
    #: Version of Whimbrel that it is of.
    version: str


class MachineSettings(TypedDict):
    """Settings of a machine on the host that has it. They do not move with the machine."""

    #: Start with the host.
    autostart: NotRequired[Autostart]
    #: Labels, for people and programs.
    labels: NotRequired[dict[str, str]]
    #: Remark of its users; empty if there is none.
    note: NotRequired[str]
    #: Restart after the machine has ended by itself.
    restart: NotRequired[RestartRule]


class MachineStateStarting(TypedDict):
    """QEMU is being started."""

    kind: Literal["starting"]


class MachineStateRunning(TypedDict):
    """CPUs run, and all pages are here."""

    kind: Literal["running"]


class MachineStatePaused(TypedDict):
    """CPUs are paused."""

    kind: Literal["paused"]


#: CPUs run, and some pages are still in the store or on another host.
MachineStateLoading = TypedDict(
    "MachineStateLoading",
    {
        "from": "NotRequired[Name | None]",
        "kind": 'Literal["loading"]',
        "resident_pages": "int",
        "stalled": "NotRequired[str | None]",
        "total_pages": "int",
    },
)


class MachineStateServingPages(TypedDict):
    """Machine runs on another host, which fetches missing pages from this one."""

    kind: Literal["serving_pages"]
    #: Number of missing pages, if it is known.
    missing_pages: NotRequired[int | None]
    #: Cause if the target cannot fetch pages at the moment.
    stalled: NotRequired[str | None]
    #: Target of the migration.
    to: Name


class MachineStateMigrating(TypedDict):
    """Machine is migrating to another host, and still runs here."""

    kind: Literal["migrating"]


class MachineStateSuspended(TypedDict):
    """Machine is a capsule in the store, without a QEMU process."""

    kind: Literal["suspended"]


class MachineStateHandedOff(TypedDict):
    """Suspended machine was handed off to another host, which may resume it."""

    kind: Literal["handed_off"]
    #: Host that may resume it.
    to: Name


class MachineStateRemote(TypedDict):
    """Machine runs on another host and uses the network of this one through a tunnel."""

    kind: Literal["remote"]


class MachineStateStopped(TypedDict):
    """Machine is switched off."""

    kind: Literal["stopped"]


class MachineStateCrashed(TypedDict):
    """QEMU ended unexpectedly."""

    kind: Literal["crashed"]
    #: Cause as far as it is known.
    reason: str


class MachineStateUnreadable(TypedDict):
    """Record of the machine cannot be read; only its name is known, and nothing of it is touched.
    """

    kind: Literal["unreadable"]
    #: Defect of the record.
    reason: str


class MachineUsage(TypedDict):
    """Totals of a machine that has processes, since they were started. Two readings give its rates.
    """

    #: Time of the reading.
    at_ms: int
    #: Processor time of its QEMU and of the process that serves it.
    cpu_ms: int
    #: Name of the machine on this host.
    name: Name
    #: Bytes that the guest read from its disks.
    read: int
    #: Bytes that the guest received from its networks.
    received: int
    #: Memory of these processes on the host.
    resident: int
    #: Bytes that the guest sent to its networks.
    sent: int
    #: Bytes that the guest wrote to its disks.
    written: int


class MatchRequest(TypedDict):
    """Body of `POST /v1/match`: find the golden capsule that fits best."""

    host: NotRequired[Name | None]
    #: Terms that it must meet.
    terms: Terms


class MigrateRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/migrate`."""

    #: Use a `rate_min` of 100 Mbit/s, or of `rate_max` if that is less.
    adaptive: NotRequired[bool]
    #: Keep copying until the predicted downtime is at most this. The machine runs on here if the
    #: downtime before the handover exceeds it by more than a second.
    downtime_max_ms: NotRequired[int | None]
    #: Let the guest drop clean caches before the first round.
    free_caches: NotRequired[bool]
    #: Target, a trusted host with an address.
    host: Name
    #: Mode of the migration.
    mode: NotRequired[MigrateMode]
    network: NotRequired[MoveNetwork | None]
    #: Do not let the guest agent suspend processes that write too fast.
    no_stun: NotRequired[bool]
    #: Limit for the rate, in bytes per second.
    rate_max: NotRequired[int | None]
    #: Rate of the first round, in bytes per second. Each later round runs at the dirty rate plus
    #: `rate_step`, but not above `rate_max`. Without this and `adaptive`, all rounds run at the
    #: rate of the link or `rate_max`.
    rate_min: NotRequired[int | None]
    #: Step above the dirty rate, in bytes per second [default: 50 Mbit/s].
    rate_step: NotRequired[int | None]
    #: Most rounds of the mode `hybrid` before the machine runs on the target [default: 2]. Fewer if
    #: the downtime would be short enough earlier, or if rounds do not help.
    rounds: NotRequired[int | None]
    safe: NotRequired[Name | None]
    #: Least share of time, 20 to 100 percent, for which the virtual CPUs of a machine run that
    #: writes faster than it can be copied [default: 20; 100 does not slow it down].
    throttle: NotRequired[int | None]
    #: Give up, with the machine running here, if it was not handed over within this time.
    time_max_ms: NotRequired[int | None]


class MigrationEndMoved(TypedDict):
    """Machine runs on the target."""

    #: Time in which no CPU of the machine ran.
    downtime_ms: float
    end: Literal["moved"]
    #: Outcome for the network ports.
    network: NetworkHandover
    pause: NotRequired[DowntimeInfo | None]
    #: Reason for the end of the rounds.
    stopped_by: RoundsEnd
    #: Total bytes on the wire.
    wire_bytes: int


class MigrationEndFailed(TypedDict):
    """Migration failed or was cancelled."""

    end: Literal["failed"]
    #: Cause of the failure.
    reason: str


#: Record of a migration that has ended.
MigrationRecordMoved = TypedDict(
    "MigrationRecordMoved",
    {
        "from": "Name",
        "id": "MigrationId",
        "machine": "Name",
        "request": "MigrateRequest",
        "rounds": "list[RoundInfo]",
        "started_ms": "int",
        "total_ms": "float",
        "downtime_ms": "float",
        "end": 'Literal["moved"]',
        "network": "NetworkHandover",
        "pause": "NotRequired[DowntimeInfo | None]",
        "stopped_by": "RoundsEnd",
        "wire_bytes": "int",
    },
)


#: Record of a migration that has ended.
MigrationRecordFailed = TypedDict(
    "MigrationRecordFailed",
    {
        "from": "Name",
        "id": "MigrationId",
        "machine": "Name",
        "request": "MigrateRequest",
        "rounds": "list[RoundInfo]",
        "started_ms": "int",
        "total_ms": "float",
        "end": 'Literal["failed"]',
        "reason": "str",
    },
)


class MirroredWrites(TypedDict):
    """Disk writes that were mirrored to the target of a migration."""

    #: Bytes of these writes, in whole pages.
    bytes: int
    #: Longest time for which a write waited.
    longest_us: int
    #: Average time for which a write waited for the target.
    waited_us: int
    #: Number of writes.
    writes: int


class MoveOutcomePlanned(TypedDict):
    """Machine that would move, in a dry run."""

    kind: Literal["planned"]


class MoveOutcomeMoved(TypedDict):
    """Machine that runs on its target."""

    #: Downtime as the hosts measured it.
    downtime_ms: float
    kind: Literal["moved"]
    #: Time from the request to the end.
    total_ms: float


class MoveOutcomeNoRoom(TypedDict):
    """Machine for which no host has capacity."""

    kind: Literal["no_room"]
    #: Reason of each host, one line each.
    reasons: list[str]


class MoveOutcomeFailed(TypedDict):
    """Machine whose migration failed."""

    #: Cause, and the state of the machine.
    error: ApiError
    kind: Literal["failed"]


class MoveOutcomeNotBegun(TypedDict):
    """Machine that was not tried, because another migration had failed."""

    kind: Literal["not_begun"]


class MoveOutcomeLeft(TypedDict):
    """Machine that does not run here, or is migrating already."""

    kind: Literal["left"]
    #: State of the machine.
    state: MachineState


class NetworkAddress(TypedDict):
    """Address of a machine in a managed network."""

    #: IPv4 address that it gets by DHCP.
    address: str
    #: Hardware address of its port.
    mac: str
    #: Name of the machine.
    machine: Name


class NetworkHandoverNoPorts(TypedDict):
    """Machine has no ports that are plugged in."""

    kind: Literal["no_ports"]


class NetworkHandoverAnnounced(TypedDict):
    """Ports joined their bridges and were announced to the network."""

    kind: Literal["announced"]
    #: Number of ports.
    ports: int


class NetworkHandoverTunnelled(TypedDict):
    """Ports stay in the network of the home host, through a tunnel."""

    #: Home of the machine.
    home: Name
    kind: Literal["tunnelled"]
    #: Number of ports.
    ports: int


class NetworkHandoverUnplugged(TypedDict):
    """Some ports are unplugged, because the target has no such bridge."""

    kind: Literal["unplugged"]
    #: Bridges that the target does not have.
    missing: list[str]


class NetworkHost(TypedDict):
    """Another host that shares a managed network."""

    #: Name of the host.
    host: Name
    #: Whether frames pass between the two hosts.
    joined: bool
    #: Addresses of its machines, as the host said them last.
    machines: list[NetworkAddress]
    #: Why not, as far as it is known.
    reason: NotRequired[str | None]


class NetworkHostsRequest(TypedDict):
    """Changes of the hosts that share a managed network."""

    #: Trusted hosts to share it with.
    share: NotRequired[list[Name]]
    #: Hosts to share it with no longer.
    unshare: NotRequired[list[Name]]


class NetworkInfo(TypedDict):
    """A managed network."""

    #: Address of the host, which is gateway and name server.
    gateway: str
    #: Other hosts that share the network.
    hosts: NotRequired[list[NetworkHost]]
    #: Whether machines reach nothing but each other and the host.
    isolated: bool
    #: Addresses of machines.
    machines: list[NetworkAddress]
    #: Name of the network and of its bridge.
    name: str
    #: Ports of the host that lead to machines.
    ports: list[PublishedPort]
    #: Why the network does not work, if it does not.
    problem: NotRequired[str | None]
    #: IPv4 addresses of the network.
    subnet: str
    #: IPv6 addresses; none if the network has none.
    subnet6: NotRequired[str | None]


class NetworkRequest(TypedDict):
    """A network to create."""

    #: Whether machines reach nothing but each other and the host.
    isolated: NotRequired[bool]
    #: Name of the network and of its bridge: up to 15 small letters, digits and `_`, a letter
    #: first.
    name: str
    #: IPv4 addresses, as `10.1.2.0/24` [default: a /24 that follows from the name].
    subnet: NotRequired[str | None]
    #: IPv6 addresses, a /64 as `fd00:1:2:3::/64`, or `none` [default: a /64 that follows from the
    #: name].
    subnet6: NotRequired[str | None]


class NewToken(TypedDict):
    """A new token. Its text is in no other answer."""

    #: Text of the token, for the header `Authorization: Bearer TEXT`.
    token: str
    #: Tags that it is for.
    capsules: NotRequired[list[str] | None]
    #: Time at which it was created.
    created_ms: int
    #: Time at which it expires.
    expires_ms: NotRequired[int | None]
    #: Machines that it is for; with neither list, it is for everything.
    machines: NotRequired[list[str] | None]
    #: Name of the token.
    name: Name
    #: What its holder may do.
    role: Role


class NicInfo(TypedDict):
    """Description of a network port."""

    #: Addresses in its managed network, and those that qemu-ga in the guest says.
    addresses: NotRequired[list[str]]
    #: Bridge of the port; none if it is unplugged.
    bridge: NotRequired[str | None]
    #: Hardware address of the port.
    mac: str


class NicRequest(TypedDict):
    """Network port of a new machine."""

    #: Bridge on the host; none leaves the port unplugged.
    bridge: NotRequired[str | None]
    #: Hardware address [default: a random one].
    mac: NotRequired[str | None]


class OperationRunning(TypedDict):
    """State of an operation at one instant."""

    #: Number of the operation.
    id: OperationId
    #: Kind of the operation.
    kind: OperationKind
    #: Progress of the operation.
    progress: Progress
    #: Time of the start.
    started_ms: int
    #: Machine, capsule or path that it works on, as the caller named it.
    subject: str
    state: Literal["running"]


class OperationSucceeded(TypedDict):
    """State of an operation at one instant."""

    #: Number of the operation.
    id: OperationId
    #: Kind of the operation.
    kind: OperationKind
    #: Progress of the operation.
    progress: Progress
    #: Time of the start.
    started_ms: int
    #: Machine, capsule or path that it works on, as the caller named it.
    subject: str
    #: Result of the operation.
    result: OperationResult
    state: Literal["succeeded"]


class OperationFailed(TypedDict):
    """State of an operation at one instant."""

    #: Number of the operation.
    id: OperationId
    #: Kind of the operation.
    kind: OperationKind
    #: Progress of the operation.
    progress: Progress
    #: Time of the start.
    started_ms: int
    #: Machine, capsule or path that it works on, as the caller named it.
    subject: str
    #: Cause of the failure, and the state that is left.
    error: ApiError
    state: Literal["failed"]


class OperationCancelled(TypedDict):
    """State of an operation at one instant."""

    #: Number of the operation.
    id: OperationId
    #: Kind of the operation.
    kind: OperationKind
    #: Progress of the operation.
    progress: Progress
    #: Time of the start.
    started_ms: int
    #: Machine, capsule or path that it works on, as the caller named it.
    subject: str
    #: State that is left, like `the machine runs on, nothing was stored`.
    left: str
    state: Literal["cancelled"]


class OperationResultCheckpoint(TypedDict):
    """Capsule that was taken of a machine that keeps running."""

    kind: Literal["checkpoint"]
    #: Memory that the guest released through its balloon, if that was requested.
    balloon_freed: NotRequired[int | None]
    #: Bytes that were added to the store.
    bytes_added: int
    #: Id of the new capsule.
    capsule: str
    #: Time for which the machine was paused; for a suspend, until the capsule was durable.
    pause_ms: float
    #: Rounds; the machine was paused during the last one.
    rounds: list[RoundInfo]
    #: Time from the request until the capsule was durable.
    total_ms: float


class OperationResultSuspend(TypedDict):
    """Capsule that was taken of a machine that was ended."""

    kind: Literal["suspend"]
    #: Memory that the guest released through its balloon, if that was requested.
    balloon_freed: NotRequired[int | None]
    #: Bytes that were added to the store.
    bytes_added: int
    #: Id of the new capsule.
    capsule: str
    #: Time for which the machine was paused; for a suspend, until the capsule was durable.
    pause_ms: float
    #: Rounds; the machine was paused during the last one.
    rounds: list[RoundInfo]
    #: Time from the request until the capsule was durable.
    total_ms: float


class OperationResultRewind(TypedDict):
    """Machine that was taken back to an earlier capsule."""

    #: Capsule of the machine as it was before.
    before: str
    #: Capsule that the machine was taken back to.
    capsule: str
    kind: Literal["rewind"]
    #: Name of the machine.
    machine: Name
    #: Tag of the capsule `before`, which keeps it.
    tag: Name
    #: Time from the request until its CPUs ran.
    to_running_ms: float


class OperationResultResume(TypedDict):
    """Machine that was resumed."""

    kind: Literal["resume"]
    #: Name of the machine, in a list as for clones.
    machines: list[Name]
    #: Time from the request until its CPUs ran.
    to_running_ms: float


class OperationResultClone(TypedDict):
    """Machines that were cloned."""

    kind: Literal["clone"]
    #: Names of the machines.
    machines: list[Name]
    #: Time from the request until the CPUs of the last one ran.
    to_running_ms: float


class OperationResultMigrate(TypedDict):
    """Machine that was migrated."""

    #: Downtime as the hosts measured it.
    downtime_ms: float
    #: Memory that the guest released before the first round.
    freed: NotRequired[int | None]
    #: Target of the migration.
    host: Name
    kind: Literal["migrate"]
    #: Outcome for the network ports.
    network: NetworkHandover
    pause: NotRequired[DowntimeInfo | None]
    #: Whether the machine was paused by its user and still is.
    paused: NotRequired[bool]
    postcopy: NotRequired[PostcopyInfo | None]
    #: Rounds; the machine was paused during the last one.
    rounds: list[RoundInfo]
    #: Measures that slowed down the machine.
    slowed: NotRequired[ThrottleReport]
    #: Time from the request to the end.
    total_ms: float
    #: Total bytes on the wire.
    wire_bytes: int


class OperationResultEvacuate(TypedDict):
    """Outcome for each machine of a host."""

    kind: Literal["evacuate"]
    #: Whether this was a dry run.
    dry_run: bool
    #: Whether no machine runs on the host any more; for a dry run, whether none would.
    empty: bool
    #: Machines in the order of their migrations, then those that stay.
    machines: list[EvacuatedMachine]
    #: Number of machines that still run there because the asking host may not read and write them.
    withheld: NotRequired[int]


class OperationResultProtect(TypedDict):
    """Machine that is protected from now on."""

    #: Host of the standby.
    host: Name
    kind: Literal["protect"]
    #: Time for which the machine was paused at the end of seeding.
    pause_ms: float
    #: Time from the request until the machine was protected.
    total_ms: float
    #: Bytes on the wire for seeding.
    wire_bytes: int
    #: Witness; none if a person decides about a takeover.
    witness: NotRequired[str | None]


class OperationResultFailover(TypedDict):
    """Machine that was switched over to its standby."""

    #: Time from the last instruction here until the machine ran there; on a standby, from the
    #: request.
    downtime_ms: float
    #: Host of the standby, where the machine runs now.
    host: Name
    kind: Literal["failover"]


class OperationResultGc(TypedDict):
    """Garbage collection of the store."""

    #: Bytes that were freed on disk.
    freed: int
    kind: Literal["gc"]
    #: Bytes that were moved to new packs.
    moved: int
    #: Packs that are deleted once earlier writers have ended.
    packs_waiting: int
    #: Bytes that the store uses now.
    stored: int


class OperationResultVerify(TypedDict):
    """Check of the store. There is no damage if `damaged` is empty."""

    #: Bytes that were read.
    bytes: int
    #: Number of capsules that were checked.
    capsules: int
    #: Places with damage.
    damaged: list[Damage]
    kind: Literal["verify"]
    #: Number of pages and other objects that were checked.
    objects: int


class OperationResultSeal(TypedDict):
    """Content that is encrypted now."""

    kind: Literal["seal"]
    #: Bytes that are not encrypted still.
    plain: int
    #: Bytes that were not encrypted and are gone.
    sealed: int


class OperationResultRepair(TypedDict):
    """Capsules that were damaged; none if the list is empty."""

    #: Where the objects were looked for.
    asked: list[str]
    #: Capsules with damaged or missing objects.
    capsules: list[RepairedCapsule]
    #: Damaged places that nothing needs any more; the next garbage collections free them.
    dropped: int
    #: First reason why an object did not come.
    failure: NotRequired[str | None]
    kind: Literal["repair"]


class OperationResultExport(TypedDict):
    """File that was written."""

    #: Length of the file.
    bytes: int
    kind: Literal["export"]
    #: Path of the file.
    path: str


class OperationResultImport(TypedDict):
    """Capsule that was read from a file."""

    #: Bytes that were added to the store.
    added: int
    #: Id of the new capsule.
    capsule: str
    kind: Literal["import"]


class OperationResultBucket(TypedDict):
    """Capsules of a bucket."""

    #: What has a name there.
    capsules: list[BucketCapsule]
    #: Bytes that were freed there.
    freed: int
    kind: Literal["bucket"]


class OperationResultPull(TypedDict):
    """Capsule that was fetched."""

    kind: Literal["pull"]
    #: Id of the capsule.
    capsule: str
    #: Host or pool on the other side.
    host: str
    #: Pages that were sent.
    pages: int
    #: Time from the request to the end.
    total_ms: float
    #: Whether the capsule is complete at the receiver.
    whole: bool
    #: Bytes on the wire, both ways.
    wire_bytes: int


class OperationResultPush(TypedDict):
    """Machine or capsule that was sent to another host."""

    kind: Literal["push"]
    machine: NotRequired[Name | None]
    #: Id of the capsule.
    capsule: str
    #: Host or pool on the other side.
    host: str
    #: Pages that were sent.
    pages: int
    #: Time from the request to the end.
    total_ms: float
    #: Whether the capsule is complete at the receiver.
    whole: bool
    #: Bytes on the wire, both ways.
    wire_bytes: int


class OperationResultFollow(TypedDict):
    """Upload of the capsules of a machine that was started or stopped."""

    #: Target, a host or a pool; none if the upload was stopped.
    host: NotRequired[str | None]
    kind: Literal["follow"]


class OperationResultCache(TypedDict):
    """File that was indexed for the hash cache, or removed from it."""

    kind: Literal["cache"]
    #: Number of its pages that are not zero.
    pages: int


class OperationStateRunning(TypedDict):
    """Operation is running."""

    state: Literal["running"]


class OperationStateSucceeded(TypedDict):
    """Operation has ended without an error."""

    #: Result of the operation.
    result: OperationResult
    state: Literal["succeeded"]


class OperationStateFailed(TypedDict):
    """Operation has ended with an error."""

    #: Cause of the failure, and the state that is left.
    error: ApiError
    state: Literal["failed"]


class OperationStateCancelled(TypedDict):
    """Operation was cancelled."""

    #: State that is left, like `the machine runs on, nothing was stored`.
    left: str
    state: Literal["cancelled"]


class OutdatedChild(TypedDict):
    """Machine or capsule that is based on an old version."""

    #: Outdated capsule, or the capsule that the machine is based on.
    capsule: str
    #: Changes of each disk. Empty if they are not known.
    disks: list[DiskRebase]
    machine: NotRequired[Name | None]
    #: Names of the capsule.
    names: list[Name]
    #: Old version that it is based on.
    old: str
    #: Reason why the changes are not known.
    unknown: NotRequired[str | None]


class OutdatedReport(TypedDict):
    """Machines and capsules that are based on old versions of a capsule."""

    #: Old versions, newest first.
    old: list[RefVersion]
    #: New version of the capsule.
    onto: str
    #: Descendants of an old version that do not descend from the new one.
    standing: list[OutdatedChild]


class PoolBenefactor(TypedDict):
    """Member of a pool that lends a disk."""

    #: Address for clients.
    address: str
    #: Bytes that it offers.
    capacity: int
    #: Chunks that were found damaged or missing there.
    faults: int
    #: Bytes that it can still store.
    free: int
    #: Name of the benefactor.
    name: str
    scrub: NotRequired[PoolScrub | None]
    #: Seconds since it was heard last.
    silent_s: int
    #: State: `online`, `offline`, `lost` or `draining`.
    state: str
    #: Bytes of its chunks.
    used: int


class PoolInfo(TypedDict):
    """Pool, as one of its managers sees it."""

    #: Managers, as `whimbrel pool manager` prints them, with commas between them.
    managers: str
    #: Why no manager says more, if none does.
    problem: NotRequired[str | None]
    state: NotRequired[PoolState | None]


class PoolScrub(TypedDict):
    """Round in which a benefactor reads and checks all that it has."""

    #: Bytes checked in this round.
    checked: int
    #: Damaged copies found in this round or the last.
    damaged: int
    #: Seconds since the last complete round; none before the first.
    ended_s: NotRequired[int | None]
    #: Whether a round at the set rate takes longer than the set time.
    late: bool
    #: Bytes that the benefactor has.
    of: int


class PoolState(TypedDict):
    """State of a pool."""

    #: Age of the newest backup of the metadata; none without one.
    backup_age_s: NotRequired[int | None]
    #: Members that lend disks.
    benefactors: list[PoolBenefactor]
    #: Number of files.
    files: int
    #: Bytes of all versions.
    logical: int
    #: Chunks without a reachable copy.
    lost: int
    #: Versions that users or holders have pinned.
    pinned: int
    #: Seconds until all chunks have their copies, at the present rate; none if there is no
    #: progress.
    repaired_in_s: NotRequired[int | None]
    #: Chunks with fewer copies than required.
    short_of_copies: int
    #: Bytes of their distinct chunks.
    unique: int
    #: Number of their versions.
    versions: int
    #: Files that are being written.
    writing: int


class PortRequest(TypedDict):
    """A port of the host that leads to a port of a machine."""

    #: Port of the machine.
    guest_port: int
    #: Address of the host [default: all of its addresses].
    listen: NotRequired[str | None]
    #: Port of the host.
    port: int
    #: Protocol of both.
    protocol: NotRequired[PortProtocol]


class PortsRequest(TypedDict):
    """Changes of a machine's published ports."""

    #: Ports to publish.
    publish: NotRequired[list[PortRequest]]
    #: Ports of the host to publish no longer.
    unpublish: NotRequired[list[HostPort]]


class PostcopyInfo(TypedDict):
    """Page fetch of a postcopy migration."""

    #: Bytes on the wire since the start of the fetch.
    bytes: int
    #: Number of times that the guest waited for a page.
    faults: int
    #: Missing pages at the start of the fetch; none if the daemon was restarted since.
    initial_missing_pages: NotRequired[int | None]
    #: Longest of these waits.
    longest_ms: float
    #: Pages that are missing now, as far as it is known.
    missing_pages: int
    #: Cause if no pages arrive at the moment.
    stalled: NotRequired[str | None]
    #: Total time of these waits.
    waited_ms: float


class PreviousCapsule(TypedDict):
    """Capsule that lost a name."""

    #: Id of the capsule.
    capsule: str
    #: Children in this store, which do not depend on it.
    children: list[str]
    #: Machines of this host that need it, so that it is retained without a name.
    machines: NotRequired[list[Name]]
    #: Names that it still has.
    names: list[Name]


class Progress(TypedDict):
    """Progress of an operation."""

    #: Further information as text.
    detail: NotRequired[str | None]
    #: Units of this stage that are done.
    done: int
    postcopy: NotRequired[PostcopyInfo | None]
    #: Recent rate in units per second.
    rate_per_s: NotRequired[float | None]
    #: Rounds of a migration that have ended.
    rounds: NotRequired[list[RoundInfo]]
    #: Current stage, like `copying round 2` or `writing the index`.
    stage: str
    #: Units of this stage in total, once that is known. The number may grow.
    total: NotRequired[int | None]
    #: Unit of the counts.
    unit: Unit


class PromoteReport(TypedDict):
    """Result of a promotion."""

    #: Bytes added to the store.
    bytes_added: int
    #: Bytes of pages that were copied.
    bytes_copied: int
    #: Capsule without parents.
    capsule: str
    #: Time that the promotion took.
    ms: float
    #: Parents of the old capsule.
    parents: list[str]
    #: Refs of the new capsule.
    refs: list[Name]
    #: Old capsule; equal to the new one if it had no parents.
    was: str


class PromoteRequest(TypedDict):
    """Body of `POST /v1/promote`."""

    #: Move all refs of the old capsule to the new one.
    all_refs: NotRequired[bool]
    #: Capsule to detach from its parents. A ref that is given here moves to the new capsule, unless
    #: `tag` is set.
    capsule: CapsuleRef
    tag: NotRequired[Name | None]


class ProtectFigures(TypedDict):
    """Figures of a protection. Times are of the last 1,200 epochs, bytes of all epochs."""

    #: Pages that the standby requested again.
    again_pages: int
    #: Bytes of the blocks that had changed in them.
    changed_bytes: int
    #: Bytes of device states that were sent.
    device_bytes: int
    #: Bytes of all dirty pages.
    dirty_bytes: int
    #: Average number of dirty pages of an epoch.
    dirty_pages: float
    #: Median length of an epoch.
    epoch_ms: float
    #: Number of epochs that the standby has.
    epochs: int
    #: Memory that block hashes use on this host.
    hash_bytes: int
    #: Median time from the end of an epoch until its output left.
    output_delay_p50_ms: float
    #: Time until output left that 99 % of the epochs do not exceed.
    output_delay_p99_ms: float
    #: Median pause of an epoch.
    pause_p50_ms: float
    #: Pause that 99 % of the epochs do not exceed.
    pause_p99_ms: float
    #: Medians of the parts of the pause.
    pause_parts: EpochPauseParts
    #: Bytes that were sent, including device states.
    sent_bytes: int
    #: Number of epochs that had to wait for the previous one.
    stretched: int
    #: Bytes of the changed blocks without duplicates.
    unshared_bytes: int


class ProtectRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/protect`."""

    block: NotRequired[ProtectBlock | None]
    #: Length of an epoch in milliseconds, 25 to 1000 [default: 50]; in mode replay 100 to 10000
    #: [default: 1000].
    epoch_ms: NotRequired[int | None]
    #: Consistency group: epochs of all its machines on this host end at one instant, and their
    #: output leaves when all standbys have the epoch. The slowest machine determines the length.
    group: NotRequired[str | None]
    #: Host of the standby.
    host: Name
    keep: NotRequired[SnapshotRule | None]
    #: Lease in milliseconds, 200 to 60000 [default: 400]: how long the primary may be silent before
    #: the standby may take over.
    lease_ms: NotRequired[int | None]
    #: Encoding of changes, and the event that output waits for.
    mode: NotRequired[ProtectMode]
    #: Limit for the rate to the standby, in bytes per second. A lower rate makes epochs longer and
    #: delays output.
    rate_max: NotRequired[int | None]
    #: Spare hosts, 16 at most. If the standby is lost while the machine runs here, the first of
    #: them becomes the standby, and the lost one becomes the last spare; after a takeover, the
    #: machine's old host does.
    spares: NotRequired[list[Name]]
    #: Longest epoch of a machine that sends nothing, as a multiple of `epoch_ms`, and never over a
    #: second [1 to 20, default 4; 1 in a group and in the other modes]. Such an epoch ends as soon
    #: as output waits and the usual length has passed.
    stretch: NotRequired[int | None]
    then: NotRequired[Name | None]
    #: Witness, which decides who runs the machine if the hosts lose contact: a third host, or an
    #: etcd as `etcd://HOST:PORT[,HOST:PORT]`. Without one there is no automatic takeover.
    witness: NotRequired[str | None]


class ProtectStateSeeding(TypedDict):
    """First copy to the standby, which cannot take over yet."""

    kind: Literal["seeding"]


class ProtectStateProtected(TypedDict):
    """Standby has the complete machine as of the last epoch."""

    kind: Literal["protected"]


class ProtectStateUnprotected(TypedDict):
    """No standby can take over."""

    kind: Literal["unprotected"]
    #: Cause of that state.
    reason: str


class ProtectStateFenced(TypedDict):
    """Machine is cut off until its ownership is known."""

    kind: Literal["fenced"]
    #: Event that the host waits for.
    reason: str


class ProtectionInfo(TypedDict):
    """Protection as one of its sides sees it."""

    #: Last epoch that the standby has.
    epoch: int
    figures: NotRequired[ProtectFigures | None]
    #: Consistency group of the machine.
    group: NotRequired[str | None]
    #: Host of the other side.
    host: Name
    #: Milliseconds since the standby got the last epoch.
    lag_ms: int
    #: Encoding of changes, and the event that output waits for.
    mode: NotRequired[ProtectMode]
    #: Side of this host.
    role: ProtectRole
    #: Spare hosts, the next standby first.
    spares: NotRequired[list[Name]]
    #: State of the protection.
    state: ProtectState
    #: Witness of the protection.
    witness: NotRequired[str | None]
    #: Whether the witness has answered recently.
    witness_answers: NotRequired[bool | None]


class PublishedPort(TypedDict):
    """A published port as it is."""

    #: Address of the machine.
    address: str
    #: Whether something in the machine took a connection just now; none where nobody tried, as for
    #: UDP.
    answers: NotRequired[bool | None]
    #: Port of the machine.
    guest_port: int
    #: Address of the host; none stands for all.
    listen: NotRequired[str | None]
    #: Name of the machine.
    machine: Name
    #: Port of the host.
    port: int
    #: Protocol of both.
    protocol: PortProtocol


class PullRequest(TypedDict):
    """Body of `POST /v1/pull`: fetch a capsule."""

    #: Name of the capsule on the other side.
    capsule: CapsuleRef
    host: NotRequired[Name | None]
    #: Fetch only the description; pages are fetched when they are read.
    lazy: NotRequired[bool]
    #: Pool to fetch from, as `MANAGER[,MANAGER][/FOLDER]`; a manager is `HOST:PORT/KEY`. Or a
    #: bucket, as `s3://BUCKET[/PREFIX][?endpoint=URL]`.
    pool: NotRequired[str | None]
    tag: NotRequired[Name | None]


class PushRequest(TypedDict):
    """Body of `POST /v1/push`: send a machine or a capsule to another host or to a pool."""

    #: Shrinking of guest memory before the suspend.
    balloon: NotRequired[BalloonTarget]
    #: Leave the machine running, and upload every new capsule of it in the background, also after a
    #: restart of the daemon.
    follow: NotRequired[bool]
    host: NotRequired[Name | None]
    #: Target folder of a pool, as `MANAGER[,MANAGER][/FOLDER]`; a manager is `HOST:PORT/KEY`. Or a
    #: bucket, as `s3://BUCKET[/PREFIX][?endpoint=URL]`. The newest capsule of the machine, or the
    #: capsule, is copied.
    pool: NotRequired[str | None]
    #: Machine, which is suspended and handed off to the other host, or capsule, which is copied.
    subject: CapsuleRef
    #: Stop that upload.
    unfollow: NotRequired[bool]


class RefRights(TypedDict):
    """Body of `PUT /v1/trust/{name}`: the refs of this host that a trusted host may use.  The lists
    have patterns with `*` and `?`. Without both lists the host may use all refs; if only one
    list is set, the other one is empty.
    """

    #: Patterns of refs that it may read.
    read: NotRequired[list[str] | None]
    #: Patterns of refs that it may write.
    write: NotRequired[list[str] | None]


class RefVersion(TypedDict):
    """Entry in the history of a ref."""

    #: Capsule that the ref named from then on.
    capsule: str
    #: Whether the capsule is still in the store.
    here: bool
    #: Capsule that it named before; none for the first entry, or if that is no longer stored.
    previous: NotRequired[str | None]
    #: Time of the change; 0 if it is not known.
    time_ms: int


class RemoteCapsule(TypedDict):
    """Capsule that another host offers."""

    #: Size of all disks.
    disks: int
    #: Name of the host.
    host: Name
    #: Digest of the manifest.
    id: str
    machine: NotRequired[Name | None]
    #: Size of the guest memory; 0 for a disk-only capsule.
    memory: int
    #: Name of the capsule there.
    name: Name
    #: Time at which the capsule was taken.
    time_ms: int
    #: Whether the capsule is complete there.
    whole: bool


class RenameRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/rename`."""

    #: New name of the machine, which must be free.
    to: Name


class RepairRequest(TypedDict):
    """Body of `POST /v1/store/repair`: fetch the damaged and missing objects of capsules."""

    capsule: NotRequired[CapsuleRef | None]
    host: NotRequired[Name | None]
    #: Pool folder with a file of the capsule's name to fetch from, as `MANAGER[,MANAGER][/FOLDER]`.
    pool: NotRequired[str | None]


class RepairedCapsule(TypedDict):
    """Outcome of a repair for one capsule."""

    #: Id of the capsule.
    capsule: str
    #: Objects that were stored again. One that several capsules share counts for one of them.
    healed: int
    #: Objects that are known to be missing still.
    missing: int
    #: Refs that name it.
    names: list[Name]


class ResolveRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/resolve`."""

    decision: NotRequired[HandoverDecision | None]


class RestartInfo(TypedDict):
    """Restarts of a machine that ended by itself."""

    #: Number of restarts in a row.
    count: int
    #: Cause of the last failed start.
    failure: NotRequired[str | None]
    #: Whether the limit was reached.
    gave_up: NotRequired[bool]
    #: Time of the next restart; none if the machine runs, or is not restarted any more.
    next_ms: NotRequired[int | None]


class RestartRule(TypedDict):
    """Reaction to the end of a machine that no user asked for."""

    #: Most restarts in a row; a run of ten minutes begins a new row.
    limit: NotRequired[int]
    #: Ends after which the machine is restarted.
    policy: NotRequired[RestartPolicy]


class ResumeRequest(TypedDict):
    """Body of `POST /v1/resume`."""

    #: Capsule to resume. A disk-only capsule boots.
    capsule: CapsuleRef
    host: NotRequired[Name | None]
    #: Time at which pages are loaded.
    mode: NotRequired[ResumeMode]
    name: NotRequired[Name | None]
    network: NotRequired[MoveNetwork | None]
    #: Pool that has the capsule, as `MANAGER[,MANAGER][/FOLDER]`; a manager is `HOST:PORT/KEY`. Or
    #: a bucket, as `s3://BUCKET[/PREFIX][?endpoint=URL]`.
    pool: NotRequired[str | None]
    #: Resume a machine that was handed off to another host, although that host may run it.
    reclaim: NotRequired[bool]
    #: Load the remaining pages in the background after a lazy start.
    then_full: NotRequired[bool]


class Retention(TypedDict):
    """Capsules of a schedule that stay: the newest ones, and the newest of each of the last hours,
    days, weeks and months (UTC) that have one.
    """

    #: Number of days.
    daily: NotRequired[int]
    #: Number of hours.
    hourly: NotRequired[int]
    #: Number of newest capsules.
    last: NotRequired[int]
    #: Remove even the newest capsule if the numbers say so.
    may_empty: NotRequired[bool]
    #: Number of months.
    monthly: NotRequired[int]
    #: Number of weeks, from Monday.
    weekly: NotRequired[int]


class RewindRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/rewind`."""

    #: Capsule that the machine goes back to: an earlier one of this machine, or one that it comes
    #: from.
    capsule: CapsuleRef


class RoundInfo(TypedDict):
    """Round: one pass over the dirty pages."""

    #: Start of the round, since the start of the first one.
    begun_ms: NotRequired[float]
    #: Bytes that were sent or stored, after pages that are there already were left out, and after
    #: compression.
    bytes: int
    #: Predicted downtime if the machine had been paused after the round, once it could be
    #: predicted.
    downtime_ms: NotRequired[float | None]
    #: Pages that were dirtied during the round and remained after it.
    left: NotRequired[int]
    #: Limit for the rate in bytes per second [default: none].
    limit: NotRequired[int | None]
    #: Time that the round took.
    ms: float
    #: Number of pages that were read.
    pages: int
    #: Pages that were written again before the round reached them, and were left for a later round.
    skipped: NotRequired[int]


class RunRequest(TypedDict):
    """Body of `POST /v1/machines`: create a machine and start it."""

    #: Executor of guest instructions [default: kvm if it works on the host, else tcg].
    accel: NotRequired[str | None]
    #: Command line of the kernel.
    append: NotRequired[str | None]
    #: Order in which it tries what it can boot from.
    boot_order: NotRequired[BootOrder]
    #: Absolute paths of media for CD-ROM drives, on the host. The files are read, never written.
    cdroms: NotRequired[list[str]]
    cloud_init: NotRequired[CloudInit | None]
    #: CPU model: `x86-64-v2`, `x86-64-v3`, `host` (KVM only), `max`, `baseline` (of all trusted
    #: hosts), or a name of QEMU, with features to add or leave out (`Haswell,-hle`) [default: max].
    cpu: NotRequired[str | None]
    #: Number of virtual CPUs.
    cpus: NotRequired[int]
    #: Kind of its disks and network ports [default: as the profile].
    devices: NotRequired[str | None]
    #: Disks, in the order of their device ids. The files are read, never written.
    disks: NotRequired[list[DiskSource]]
    #: Whether it has a screen, a keyboard and a pointer, for viewers of VNC.
    display: NotRequired[bool]
    #: Absolute path of the initial RAM disk of the kernel.
    initrd: NotRequired[str | None]
    #: Absolute path of a kernel to load directly, instead of booting from the first disk.
    kernel: NotRequired[str | None]
    #: Size of the guest memory, a multiple of 1 MiB.
    memory: int
    #: Name for the machine, not in use on this host.
    name: Name
    #: Sizes of empty disks, which come after the others.
    new_disks: NotRequired[list[int]]
    #: Network ports, in the order of their device ids.
    nics: NotRequired[list[NicRequest]]
    #: Hardware of the machine.
    profile: NotRequired[Profile]
    #: Ports of the host that lead to the machine; it needs a port in a managed network.
    publish: NotRequired[list[PortRequest]]
    #: Whether it starts only programs that are signed [default: as the profile].
    secure_boot: NotRequired[bool | None]
    #: Operations that the guest may request.
    self_service: NotRequired[SelfService]
    #: Settings on this host.
    settings: NotRequired[MachineSettings]
    #: Whether it has a TPM 2.0.
    tpm: NotRequired[bool]


class ScheduleInfo(TypedDict):
    """A schedule and its last runs."""

    #: Time of its creation.
    created_ms: int
    #: Time of the next run.
    next_ms: int
    #: Whether it runs now.
    running: bool
    #: Last runs, oldest first.
    runs: list[ScheduledRun]
    #: Capsules of the schedule that are retained, oldest first; those of a push are at the other
    #: host.
    tags: NotRequired[list[str]]
    #: Interval, at least a minute. Runs begin at its multiples since the beginning of 1970 (UTC).
    every_ms: int
    #: Name for the schedule: up to 30 letters, digits and `-_`.
    name: Name
    #: Shift of the runs: with an interval of a day, their time of the day.
    offset_ms: NotRequired[int]
    #: Work to do.
    work: ScheduledWork


class ScheduleReport(TypedDict):
    """Answer to a run of a schedule on request."""

    #: Tags that were removed, or would be.
    removed: list[str]
    #: Tags that stay.
    retained: list[str]
    run: NotRequired[ScheduledRun | None]


class ScheduleRequest(TypedDict):
    """Body of `POST /v1/schedules`: work to do at an interval."""

    #: Interval, at least a minute. Runs begin at its multiples since the beginning of 1970 (UTC).
    every_ms: int
    #: Name for the schedule: up to 30 letters, digits and `-_`.
    name: Name
    #: Shift of the runs: with an interval of a day, their time of the day.
    offset_ms: NotRequired[int]
    #: Work to do.
    work: ScheduledWork


class ScheduleRunRequest(TypedDict):
    """Body of `POST /v1/schedules/{name}/run`."""

    #: Change nothing; say which capsules would be removed.
    dry_run: NotRequired[bool]


class ScheduledRun(TypedDict):
    """A run of a schedule."""

    #: Time of its end.
    ended_ms: int
    #: Time of its beginning.
    started_ms: int
    #: Whether it has done its work.
    succeeded: bool
    #: What it did, or why it failed.
    text: str


class ScheduledWorkCheckpoint(TypedDict):
    """Take a capsule of a running machine, and remove old ones of the schedule."""

    #: Take a disk-only capsule.
    disks_only: NotRequired[bool]
    kind: Literal["checkpoint"]
    #: Name of the machine.
    machine: Name
    retain: NotRequired[Retention | None]


class ScheduledWorkPush(TypedDict):
    """Copy the newest capsule of a machine to a host, a pool or a bucket."""

    host: NotRequired[Name | None]
    kind: Literal["push"]
    #: Name of the machine.
    machine: Name
    #: Target folder of a pool, or a bucket, as for a push.
    pool: NotRequired[str | None]
    retain: NotRequired[Retention | None]


class ScheduledWorkVerify(TypedDict):
    """Read and check everything in the store."""

    #: Bucket that is checked [default: the store of the host].
    bucket: NotRequired[str | None]
    kind: Literal["verify"]


class ScheduledWorkGc(TypedDict):
    """Delete objects that no ref needs."""

    #: Bucket in which to do so [default: the store of the host].
    bucket: NotRequired[str | None]
    kind: Literal["gc"]


class SelfService(TypedDict):
    """Operations that a guest may request for its own machine."""

    #: Whether the guest may request a checkpoint.
    checkpoint: NotRequired[bool]
    #: Hosts to which the guest may request a migration.
    migrate: NotRequired[list[Name]]


class SessionInfo(TypedDict):
    """Session that is mounted on the host, by its root user."""

    #: Number of times the connection broke.
    broken: int
    #: Capacity of the cache in bytes.
    cache_capacity: int
    #: Bytes of the cache in use.
    cache_used: int
    #: Whether there is a connection.
    connected: bool
    #: Directory of the server.
    directory: str
    #: What has happened last, oldest first.
    events: NotRequired[list[str]]
    #: Reads that the cache answered, as a fraction of all; none before the first.
    hit_ratio: NotRequired[float | None]
    #: Place where it is mounted.
    mount: str
    #: Name of the session.
    name: str
    #: Round trip in milliseconds; none without a connection.
    round_trip_ms: NotRequired[float | None]
    #: Address of the server.
    server: str
    #: Bytes that the server does not have yet.
    unsent_bytes: int
    #: Files with such bytes.
    unsent_files: int
    #: Changes of names that the server has yet to make.
    unsent_names: int


class SettingsRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/settings`: what is absent stays as it is."""

    autostart: NotRequired[Autostart | None]
    #: Changes of its hardware; none by default.
    hardware: NotRequired[HardwareChange]
    #: Labels to set, and, with null, labels to remove.
    labels: NotRequired[dict[str, str | None]]
    #: Remark of its users; an empty one removes it.
    note: NotRequired[str | None]
    restart: NotRequired[RestartRule | None]


class SnapshotRule(TypedDict):
    """Rule for epoch snapshots."""

    #: Number of newest snapshots to retain, 1 to 10,000. Older ones without a tag lose their names.
    count: int
    #: Milliseconds between two snapshots, 1000 to a week.
    every_ms: int


class StaticAddress(TypedDict):
    """Address that a guest has without DHCP."""

    #: Address and length of its network, as `10.1.2.5/24` or `fd00::5/64`.
    address: str
    #: Address of the router to other networks.
    gateway: NotRequired[str | None]
    #: Addresses of name servers.
    nameservers: NotRequired[list[str]]


class StopRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/stop`. It answers once the machine has stopped."""

    #: Cut the power if the guest does not shut down in time.
    force: NotRequired[bool]
    #: Way to stop the machine.
    mode: NotRequired[StopMode]
    #: Seconds to wait for the guest [default: 60]. After that the request fails, and the machine
    #: keeps running, unless `force` is set.
    timeout_s: NotRequired[int | None]


class StoreEncryption(TypedDict):
    """How the store of a host is encrypted."""

    #: Name of the data key, which the master key wraps and which encrypts the content.
    data_key: NotRequired[str | None]
    #: Name of the master key, with which the daemon has to be started; none if the store is not
    #: encrypted.
    master_key: NotRequired[str | None]
    #: Bytes that are not encrypted.
    plain: int


class StoreUsage(TypedDict):
    """Content and size of a store."""

    #: Number of capsules.
    capsules: int
    #: Free bytes of the file system.
    free: int
    #: Size of the images of all capsules without sharing and compression.
    logical: int
    #: Bytes used on disk.
    stored: int


class SuspendRequest(TypedDict):
    """Body of `POST /v1/machines/{name}/suspend`."""

    #: Shrinking of guest memory before the capsule is taken.
    balloon: NotRequired[BalloonTarget]
    tag: NotRequired[Name | None]


class TagRequest(TypedDict):
    """Body of `PUT /v1/tags/{tag}`."""

    #: Capsule that the tag names from now on.
    capsule: CapsuleRef


class Tagged(TypedDict):
    """Capsule that a tag names now, with the one that it named before."""

    left: NotRequired[PreviousCapsule | None]
    #: Whether the capsule has memory and device state, so that it resumes instead of booting.
    active: bool
    #: Host on which the capsule was taken.
    host: Name
    #: Digest of the manifest.
    id: str
    #: Images of the page arrays `memory`, `disk0`, …
    images: list[ImageInfo]
    #: Labels that the user gave.
    labels: dict[str, str]
    #: Machine that the capsule was taken from.
    machine: Name
    #: Memory size of the machine.
    memory: int
    #: Refs of the capsule: tags, and the machine whose newest capsule it is.
    names: list[Name]
    #: Parents; none for the first capsule of a machine.
    parents: list[str]
    #: Time at which the capsule was taken.
    time_ms: int
    #: Whether the capsule is complete. Other hosts have the missing objects of a partial capsule.
    whole: NotRequired[bool]


#: Takeover of a machine from another host.
TakeoverInfo = TypedDict(
    "TakeoverInfo",
    {
        "at_ms": "int",
        "from": "Name",
    },
)


class ThrottleReport(TypedDict):
    """Measures that slowed down a machine which wrote faster than it could be copied."""

    #: Share of time for which the virtual CPUs ran, in percent, if it was limited.
    cpu_percent: NotRequired[int | None]
    mirrored: NotRequired[MirroredWrites | None]
    #: Processes that wrote as fast and were not suspended, because the settings of the guest forbid
    #: it.
    spared: NotRequired[list[str]]
    #: Processes that the guest agent suspended, as `name (pid)`.
    stunned: NotRequired[list[str]]


class TokenInfo(TypedDict):
    """Description of a token, without its text."""

    #: Tags that it is for.
    capsules: NotRequired[list[str] | None]
    #: Time at which it was created.
    created_ms: int
    #: Time at which it expires.
    expires_ms: NotRequired[int | None]
    #: Machines that it is for; with neither list, it is for everything.
    machines: NotRequired[list[str] | None]
    #: Name of the token.
    name: Name
    #: What its holder may do.
    role: Role


class TokenRequest(TypedDict):
    """Body of `POST /v1/tokens`: create a token."""

    #: Tags that it is for, with `*` and `?` [default: all, or none if `machines` is given].
    capsules: NotRequired[list[str] | None]
    #: Seconds until it expires; without them, it never does.
    expires_s: NotRequired[int | None]
    #: Machines that it is for, with `*` and `?` [default: all, or none if `capsules` is given].
    machines: NotRequired[list[str] | None]
    #: Name for the token, not in use.
    name: Name
    #: What its holder may do.
    role: Role


class TransferReport(TypedDict):
    """Cost of a transfer."""

    #: Id of the capsule.
    capsule: str
    #: Host or pool on the other side.
    host: str
    #: Pages that were sent.
    pages: int
    #: Time from the request to the end.
    total_ms: float
    #: Whether the capsule is complete at the receiver.
    whole: bool
    #: Bytes on the wire, both ways.
    wire_bytes: int


class TrustEntry(TypedDict):
    """Trusted host. Also the body of `POST /v1/trust`."""

    #: Address `address:port` of its daemon, or `ssh:destination`. Without one, machines can arrive
    #: from that host but not be sent to it.
    address: NotRequired[str | None]
    #: Public key, as `whimbrel key` prints it there. Optional for a host that is reached over ssh.
    key: NotRequired[str | None]
    #: Name of the host.
    name: Name
    #: Patterns with `*` and `?` of the refs that it may read. Without this and `write` it may use
    #: all refs; with one of them, only those that match.
    read: NotRequired[list[str] | None]
    #: Patterns of the refs that it may write.
    write: NotRequired[list[str] | None]


class TunnelInfo(TypedDict):
    """One end of the tunnel between a machine that runs away from home and its home network."""

    away: NotRequired[Name | None]
    #: Whether the tunnel is connected.
    connected: bool
    #: Home: the host whose network the machine uses.
    home: Name
    #: Cause if it is not connected, as far as it is known.
    reason: NotRequired[str | None]


class Uploads(TypedDict):
    """Upload of the capsules of a machine."""

    #: Cause of the last failure; none if everything was uploaded or is being uploaded.
    stalled: NotRequired[str | None]
    #: Name of a host, or folder of a pool.
    to: str

#: Whether a machine starts with its host.
Autostart = Union[
    AutostartOff,
    AutostartOn,
]

#: Shrinking of guest memory before a capsule is taken. Released memory is zero in the capsule; the
#: guest gets it back when it continues.
BalloonTarget = Union[
    BalloonTargetOff,
    BalloonTargetAuto,
    BalloonTargetTo,
]

#: Kind of an event.
EventKind = Union[
    EventKindMachine,
    EventKindMachineRemoved,
    EventKindSettings,
    EventKindTakeover,
    EventKindSelfStart,
    EventKindSchedule,
    EventKindOperationStarted,
    EventKindOperationEnded,
    EventKindMissed,
]

#: Something that happened on the host.
HostEvent = Union[
    HostEventMachine,
    HostEventMachineRemoved,
    HostEventSettings,
    HostEventTakeover,
    HostEventSelfStart,
    HostEventSchedule,
    HostEventOperationStarted,
    HostEventOperationEnded,
    HostEventMissed,
]

#: State of a machine. The aliases are the names of version 0.1, read for one release.
MachineState = Union[
    MachineStateStarting,
    MachineStateRunning,
    MachineStatePaused,
    MachineStateLoading,
    MachineStateServingPages,
    MachineStateMigrating,
    MachineStateSuspended,
    MachineStateHandedOff,
    MachineStateRemote,
    MachineStateStopped,
    MachineStateCrashed,
    MachineStateUnreadable,
]

#: End of a migration. In JSON, the field `end` has the kind, and the other fields stand beside it.
MigrationEnd = Union[
    MigrationEndMoved,
    MigrationEndFailed,
]

#: Record of a migration that has ended.
MigrationRecord = Union[
    MigrationRecordMoved,
    MigrationRecordFailed,
]

#: Outcome of an evacuation for one machine.
MoveOutcome = Union[
    MoveOutcomePlanned,
    MoveOutcomeMoved,
    MoveOutcomeNoRoom,
    MoveOutcomeFailed,
    MoveOutcomeNotBegun,
    MoveOutcomeLeft,
]

#: Outcome for the network ports of a migrated machine.
NetworkHandover = Union[
    NetworkHandoverNoPorts,
    NetworkHandoverAnnounced,
    NetworkHandoverTunnelled,
    NetworkHandoverUnplugged,
]

#: State of an operation at one instant.
Operation = Union[
    OperationRunning,
    OperationSucceeded,
    OperationFailed,
    OperationCancelled,
]

#: Result of an operation.
OperationResult = Union[
    OperationResultCheckpoint,
    OperationResultSuspend,
    OperationResultRewind,
    OperationResultResume,
    OperationResultClone,
    OperationResultMigrate,
    OperationResultEvacuate,
    OperationResultProtect,
    OperationResultFailover,
    OperationResultGc,
    OperationResultVerify,
    OperationResultSeal,
    OperationResultRepair,
    OperationResultExport,
    OperationResultImport,
    OperationResultBucket,
    OperationResultPull,
    OperationResultPush,
    OperationResultFollow,
    OperationResultCache,
]

#: Phase of an operation. In JSON, the field `state` has the kind, and the other fields stand beside
#: it.
OperationState = Union[
    OperationStateRunning,
    OperationStateSucceeded,
    OperationStateFailed,
    OperationStateCancelled,
]

#: State of a protection. The alias is the name of version 0.1, read for one release.
ProtectState = Union[
    ProtectStateSeeding,
    ProtectStateProtected,
    ProtectStateUnprotected,
    ProtectStateFenced,
]

#: Work of a schedule.
ScheduledWork = Union[
    ScheduledWorkCheckpoint,
    ScheduledWorkPush,
    ScheduledWorkVerify,
    ScheduledWorkGc,
]

__all__ = [
    "ApiError",
    "Attributes",
    "Autostart",
    "AutostartOff",
    "AutostartOn",
    "BalloonRequest",
    "BalloonTarget",
    "BalloonTargetAuto",
    "BalloonTargetOff",
    "BalloonTargetTo",
    "BootOrder",
    "BucketCapsule",
    "BucketRequest",
    "CacheAddRequest",
    "CacheInfo",
    "CacheSource",
    "CallerInfo",
    "CapsuleDiff",
    "CapsuleInfo",
    "CapsuleRef",
    "CaptureReport",
    "CheckpointRequest",
    "CloneNetwork",
    "CloneRequest",
    "CloudInit",
    "ConfigChange",
    "CpuBaseline",
    "CpuBaselineRequest",
    "CpuHost",
    "Damage",
    "DeriveRequest",
    "DirtyTraceRequest",
    "DiskInfo",
    "DiskRebase",
    "DiskSize",
    "DiskSource",
    "DowntimeInfo",
    "EpochPauseParts",
    "ErrorCode",
    "EvacuateReport",
    "EvacuateRequest",
    "EvacuatedMachine",
    "EventKind",
    "EventKindMachine",
    "EventKindMachineRemoved",
    "EventKindMissed",
    "EventKindOperationEnded",
    "EventKindOperationStarted",
    "EventKindSchedule",
    "EventKindSelfStart",
    "EventKindSettings",
    "EventKindTakeover",
    "ExecRequest",
    "ExecResult",
    "ExportFormat",
    "ExportRequest",
    "FailoverRequest",
    "FileContent",
    "FileReadRequest",
    "FileWriteRequest",
    "GoldenMatch",
    "GraphNode",
    "HandoverDecision",
    "HardwareChange",
    "HostEvent",
    "HostEventMachine",
    "HostEventMachineRemoved",
    "HostEventMissed",
    "HostEventOperationEnded",
    "HostEventOperationStarted",
    "HostEventSchedule",
    "HostEventSelfStart",
    "HostEventSettings",
    "HostEventTakeover",
    "HostInfo",
    "HostMachines",
    "HostMemory",
    "HostPort",
    "ImageDiff",
    "ImageInfo",
    "ImageOffer",
    "ImageOffers",
    "ImagePullRequest",
    "ImportFormat",
    "ImportRequest",
    "KeyChangeRequest",
    "MachineInfo",
    "MachineOnCapsule",
    "MachineProcess",
    "MachineSettings",
    "MachineState",
    "MachineStateCrashed",
    "MachineStateHandedOff",
    "MachineStateLoading",
    "MachineStateMigrating",
    "MachineStatePaused",
    "MachineStateRemote",
    "MachineStateRunning",
    "MachineStateServingPages",
    "MachineStateStarting",
    "MachineStateStopped",
    "MachineStateSuspended",
    "MachineStateUnreadable",
    "MachineUsage",
    "MatchRequest",
    "MigrateMode",
    "MigrateRequest",
    "MigrationEnd",
    "MigrationEndFailed",
    "MigrationEndMoved",
    "MigrationId",
    "MigrationRecord",
    "MigrationRecordFailed",
    "MigrationRecordMoved",
    "MirroredWrites",
    "MoveNetwork",
    "MoveOutcome",
    "MoveOutcomeFailed",
    "MoveOutcomeLeft",
    "MoveOutcomeMoved",
    "MoveOutcomeNoRoom",
    "MoveOutcomeNotBegun",
    "MoveOutcomePlanned",
    "Name",
    "NetworkAddress",
    "NetworkHandover",
    "NetworkHandoverAnnounced",
    "NetworkHandoverNoPorts",
    "NetworkHandoverTunnelled",
    "NetworkHandoverUnplugged",
    "NetworkHost",
    "NetworkHostsRequest",
    "NetworkInfo",
    "NetworkRequest",
    "NewToken",
    "NicInfo",
    "NicRequest",
    "Operation",
    "OperationCancelled",
    "OperationFailed",
    "OperationId",
    "OperationKind",
    "OperationResult",
    "OperationResultBucket",
    "OperationResultCache",
    "OperationResultCheckpoint",
    "OperationResultClone",
    "OperationResultEvacuate",
    "OperationResultExport",
    "OperationResultFailover",
    "OperationResultFollow",
    "OperationResultGc",
    "OperationResultImport",
    "OperationResultMigrate",
    "OperationResultProtect",
    "OperationResultPull",
    "OperationResultPush",
    "OperationResultRepair",
    "OperationResultResume",
    "OperationResultRewind",
    "OperationResultSeal",
    "OperationResultSuspend",
    "OperationResultVerify",
    "OperationRunning",
    "OperationState",
    "OperationStateCancelled",
    "OperationStateFailed",
    "OperationStateRunning",
    "OperationStateSucceeded",
    "OperationSucceeded",
    "OutdatedChild",
    "OutdatedReport",
    "PoolBenefactor",
    "PoolInfo",
    "PoolScrub",
    "PoolState",
    "PortProtocol",
    "PortRequest",
    "PortsRequest",
    "PostcopyInfo",
    "PreviousCapsule",
    "Profile",
    "Progress",
    "PromoteReport",
    "PromoteRequest",
    "ProtectBlock",
    "ProtectFigures",
    "ProtectMode",
    "ProtectRequest",
    "ProtectRole",
    "ProtectState",
    "ProtectStateFenced",
    "ProtectStateProtected",
    "ProtectStateSeeding",
    "ProtectStateUnprotected",
    "ProtectionInfo",
    "PublishedPort",
    "PullRequest",
    "PushRequest",
    "RefRights",
    "RefVersion",
    "RemoteCapsule",
    "RenameRequest",
    "RepairRequest",
    "RepairedCapsule",
    "ResolveRequest",
    "RestartInfo",
    "RestartPolicy",
    "RestartRule",
    "ResumeMode",
    "ResumeRequest",
    "Retention",
    "RewindRequest",
    "Role",
    "RoundInfo",
    "RoundsEnd",
    "RunRequest",
    "ScheduleInfo",
    "ScheduleReport",
    "ScheduleRequest",
    "ScheduleRunRequest",
    "ScheduledRun",
    "ScheduledWork",
    "ScheduledWorkCheckpoint",
    "ScheduledWorkGc",
    "ScheduledWorkPush",
    "ScheduledWorkVerify",
    "SelfService",
    "SessionInfo",
    "SettingsRequest",
    "SnapshotRule",
    "StaticAddress",
    "StopMode",
    "StopRequest",
    "StoreEncryption",
    "StoreUsage",
    "SuspendRequest",
    "TagRequest",
    "Tagged",
    "TakeoverInfo",
    "Terms",
    "ThrottleReport",
    "TokenInfo",
    "TokenRequest",
    "TransferReport",
    "TrustEntry",
    "TunnelInfo",
    "Unit",
    "Uploads",
]

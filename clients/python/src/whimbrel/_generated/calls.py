"""Calls of the API. Written by generate.py from docs/openapi.json; change those."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from .._path import quote
from .models import (
    Autostart,
    BalloonTarget,
    BootOrder,
    CacheInfo,
    CallerInfo,
    CapsuleDiff,
    CapsuleInfo,
    CapsuleRef,
    CloneNetwork,
    CloudInit,
    CpuBaseline,
    DiskSource,
    ExecResult,
    ExportFormat,
    FileContent,
    GoldenMatch,
    GraphNode,
    HandoverDecision,
    HardwareChange,
    HostInfo,
    HostMachines,
    HostPort,
    ImageOffers,
    ImportFormat,
    MachineInfo,
    MachineSettings,
    MachineUsage,
    MigrateMode,
    MigrationRecord,
    MoveNetwork,
    Name,
    NetworkInfo,
    NewToken,
    NicRequest,
    Operation,
    OutdatedReport,
    PoolInfo,
    PortRequest,
    PreviousCapsule,
    Profile,
    PromoteReport,
    ProtectBlock,
    ProtectMode,
    PublishedPort,
    RefVersion,
    RemoteCapsule,
    RestartRule,
    ResumeMode,
    Role,
    ScheduleInfo,
    ScheduleReport,
    ScheduledWork,
    SelfService,
    SessionInfo,
    SnapshotRule,
    StopMode,
    StoreEncryption,
    Tagged,
    Terms,
    TokenInfo,
    TrustEntry,
)


class Calls(ABC):
    """Calls of the API, which wait for their answers."""

    @abstractmethod
    def _json(self, method: str, path: str, *, query: Any = None, body: Any = None) -> Any: ...

    @abstractmethod
    def _text(self, method: str, path: str, *, query: Any = None) -> str: ...

    def balloon(self, name: Name, *, size: int) -> MachineInfo:
        """Change the memory size of a guest with its balloon."""
        answer: MachineInfo = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/balloon",
            body={
                "size": size,
            },
        )
        return answer

    def bucket(
        self,
        *,
        bucket: str,
        gc: bool | None = None,
        untag: Name | None = None,
        verify: bool | None = None,
    ) -> Operation:
        """List or verify a bucket, remove a name there, or delete objects that no name needs."""
        answer: Operation = self._json(
            "POST",
            "/v1/buckets",
            body={
                "bucket": bucket,
                "gc": gc,
                "untag": untag,
                "verify": verify,
            },
        )
        return answer

    def cache(self) -> CacheInfo:
        """State of the hash cache."""
        answer: CacheInfo = self._json("GET", "/v1/cache")
        return answer

    def cache_add(
        self,
        *,
        forget: bool | None = None,
        machine: Name | None = None,
        path: str | None = None,
    ) -> Operation:
        """Index the pages of a file, so that transfers can skip them."""
        answer: Operation = self._json(
            "POST",
            "/v1/cache",
            body={
                "forget": forget,
                "machine": machine,
                "path": path,
            },
        )
        return answer

    def caller(self) -> CallerInfo:
        """Who calls, and the calls that are allowed."""
        answer: CallerInfo = self._json("GET", "/v1/caller")
        return answer

    def cancel(self, id: int) -> Operation:
        """Cancel an operation; its last state says what it left."""
        answer: Operation = self._json("DELETE", f"/v1/operations/{quote(id)}")
        return answer

    def capsule(self, capsule: CapsuleRef) -> CapsuleInfo:
        """One capsule."""
        answer: CapsuleInfo = self._json("GET", f"/v1/capsules/{quote(capsule)}")
        return answer

    def capsules(self) -> list[CapsuleInfo]:
        """All capsules, newest first."""
        answer: list[CapsuleInfo] = self._json("GET", "/v1/capsules")
        return answer

    def change_master_key(self, *, key_file: str) -> StoreEncryption:
        """Change the master key of an encrypted store."""
        answer: StoreEncryption = self._json("PUT", "/v1/store/key", body={"key_file": key_file})
        return answer

    def checkpoint(
        self,
        name: Name,
        *,
        balloon: BalloonTarget | None = None,
        disks_only: bool | None = None,
        labels: dict[str, str] | None = None,
        quiesce: bool | None = None,
        tag: Name | None = None,
    ) -> Operation:
        """Save the state of a running machine as a capsule."""
        answer: Operation = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/checkpoint",
            body={
                "balloon": balloon,
                "disks_only": disks_only,
                "labels": labels,
                "quiesce": quiesce,
                "tag": tag,
            },
        )
        return answer

    def clone(
        self,
        *,
        capsule: CapsuleRef,
        count: int,
        mode: ResumeMode | None = None,
        network: CloneNetwork | None = None,
        prefix: Name | None = None,
    ) -> Operation:
        """Create several machines from a capsule."""
        answer: Operation = self._json(
            "POST",
            "/v1/clone",
            body={
                "capsule": capsule,
                "count": count,
                "mode": mode,
                "network": network,
                "prefix": prefix,
            },
        )
        return answer

    def console_log(self, name: Name, *, bytes: int | None = None) -> str:
        """End of the console log of a machine."""
        return self._text("GET", f"/v1/machines/{quote(name)}/console/log", query={"bytes": bytes})

    def cpu_baseline(self, *, hosts: list[Name] | None = None) -> CpuBaseline:
        """Find the CPU model that this host and others have in common."""
        answer: CpuBaseline = self._json("POST", "/v1/cpu/baseline", body={"hosts": hosts})
        return answer

    def create_network(
        self,
        *,
        name: str,
        isolated: bool | None = None,
        subnet: str | None = None,
        subnet6: str | None = None,
    ) -> NetworkInfo:
        """Create a network with a bridge, addresses, names and a way out."""
        answer: NetworkInfo = self._json(
            "POST",
            "/v1/networks",
            body={
                "isolated": isolated,
                "name": name,
                "subnet": subnet,
                "subnet6": subnet6,
            },
        )
        return answer

    def create_schedule(
        self,
        *,
        every_ms: int,
        name: Name,
        work: ScheduledWork,
        offset_ms: int | None = None,
    ) -> ScheduleInfo:
        """Create a schedule."""
        answer: ScheduleInfo = self._json(
            "POST",
            "/v1/schedules",
            body={
                "every_ms": every_ms,
                "name": name,
                "offset_ms": offset_ms,
                "work": work,
            },
        )
        return answer

    def create_token(
        self,
        *,
        name: Name,
        role: Role,
        capsules: list[str] | None = None,
        expires_s: int | None = None,
        machines: list[str] | None = None,
    ) -> NewToken:
        """Create a token; its text is in no other answer."""
        answer: NewToken = self._json(
            "POST",
            "/v1/tokens",
            body={
                "capsules": capsules,
                "expires_s": expires_s,
                "machines": machines,
                "name": name,
                "role": role,
            },
        )
        return answer

    def delete(self, name: Name, *, unreadable: bool | None = None) -> None:
        """Delete a stopped or crashed machine and the changes on its disks."""
        self._json("DELETE", f"/v1/machines/{quote(name)}", query={"unreadable": unreadable})

    def delete_network(self, name: Name) -> None:
        """Delete a network that no machine uses."""
        self._json("DELETE", f"/v1/networks/{quote(name)}")

    def delete_schedule(self, name: Name) -> None:
        """Delete a schedule; its capsules stay."""
        self._json("DELETE", f"/v1/schedules/{quote(name)}")

    def derive(
        self,
        *,
        capsule: CapsuleRef,
        name: Name,
        append: str | None = None,
        cloud_init: CloudInit | None = None,
        cpu: str | None = None,
        cpus: int | None = None,
        disk_size: int | None = None,
        display: bool | None = None,
        memory: int | None = None,
        nics: list[NicRequest] | None = None,
        profile: Profile | None = None,
        publish: list[PortRequest] | None = None,
        secure_boot: bool | None = None,
        settings: MachineSettings | None = None,
        tpm: bool | None = None,
    ) -> MachineInfo:
        """Create a machine that boots from the disks of a capsule."""
        answer: MachineInfo = self._json(
            "POST",
            "/v1/derive",
            body={
                "append": append,
                "capsule": capsule,
                "cloud_init": cloud_init,
                "cpu": cpu,
                "cpus": cpus,
                "disk_size": disk_size,
                "display": display,
                "memory": memory,
                "name": name,
                "nics": nics,
                "profile": profile,
                "publish": publish,
                "secure_boot": secure_boot,
                "settings": settings,
                "tpm": tpm,
            },
        )
        return answer

    def diff(self, capsule: CapsuleRef, other: CapsuleRef) -> CapsuleDiff:
        """Differences between two capsules."""
        answer: CapsuleDiff = self._json(
            "GET",
            f"/v1/capsules/{quote(capsule)}/diff/{quote(other)}",
        )
        return answer

    def display(self, name: Name) -> None:
        """Screen, keyboard and pointer of a machine (RFB), with `Upgrade: whimbrel-display`, or as
        a WebSocket with that subprotocol.
        """
        self._json("GET", f"/v1/machines/{quote(name)}/display")

    def distrust(self, name: Name) -> None:
        """Remove a trusted host."""
        self._json("DELETE", f"/v1/trust/{quote(name)}")

    def encryption(self) -> StoreEncryption:
        """How the store is encrypted."""
        answer: StoreEncryption = self._json("GET", "/v1/store/encryption")
        return answer

    def evacuate(
        self,
        *,
        dry_run: bool | None = None,
        host: Name | None = None,
        parallel: int | None = None,
        rate_max: int | None = None,
        sample_ms: int | None = None,
        stop_on_failure: bool | None = None,
        to: list[Name] | None = None,
    ) -> Operation:
        """Migrate all machines of a host to other hosts."""
        answer: Operation = self._json(
            "POST",
            "/v1/evacuate",
            body={
                "dry_run": dry_run,
                "host": host,
                "parallel": parallel,
                "rate_max": rate_max,
                "sample_ms": sample_ms,
                "stop_on_failure": stop_on_failure,
                "to": to,
            },
        )
        return answer

    def exec(
        self,
        name: Name,
        *,
        command: list[str],
        env: list[str] | None = None,
        input: str | None = None,
        timeout_s: int | None = None,
    ) -> ExecResult:
        """Run a program in the guest, through qemu-ga; the answer comes at its end."""
        answer: ExecResult = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/exec",
            body={
                "command": command,
                "env": env,
                "input": input,
                "timeout_s": timeout_s,
            },
        )
        return answer

    def export(
        self,
        *,
        capsule: CapsuleRef,
        format: ExportFormat,
        path: str,
        image: str | None = None,
        key: str | None = None,
    ) -> Operation:
        """Write a capsule or an image to a file of the host."""
        answer: Operation = self._json(
            "POST",
            "/v1/export",
            body={
                "capsule": capsule,
                "format": format,
                "image": image,
                "key": key,
                "path": path,
            },
        )
        return answer

    def failover(
        self,
        name: Name,
        *,
        force: bool | None = None,
        primary_is_dead: bool | None = None,
    ) -> Operation:
        """Switch a machine over to its standby."""
        answer: Operation = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/failover",
            body={
                "force": force,
                "primary_is_dead": primary_is_dead,
            },
        )
        return answer

    def family(self, capsule: CapsuleRef) -> list[GraphNode]:
        """A capsule, its ancestors and its descendants, parents first."""
        answer: list[GraphNode] = self._json("GET", f"/v1/capsules/{quote(capsule)}/graph")
        return answer

    def gc(self) -> Operation:
        """Delete objects that no ref needs."""
        answer: Operation = self._json("POST", "/v1/store/gc")
        return answer

    def graph(self) -> list[GraphNode]:
        """All capsules, parents first."""
        answer: list[GraphNode] = self._json("GET", "/v1/graph")
        return answer

    def history(self, name: Name) -> list[RefVersion]:
        """Earlier capsules of a ref, newest first."""
        answer: list[RefVersion] = self._json("GET", f"/v1/refs/{quote(name)}/history")
        return answer

    def host(self) -> HostInfo:
        """The host."""
        answer: HostInfo = self._json("GET", "/v1/host")
        return answer

    def hosts(self) -> list[HostMachines]:
        """Machines and room of this host and of the hosts that it trusts, which are asked."""
        answer: list[HostMachines] = self._json("GET", "/v1/hosts")
        return answer

    def images(self) -> ImageOffers:
        """Images of distributions that the sources of the host offer."""
        answer: ImageOffers = self._json("GET", "/v1/images")
        return answer

    def import_(
        self,
        *,
        format: ImportFormat,
        name: Name,
        path: str,
        key: str | None = None,
    ) -> Operation:
        """Read a capsule or a disk from a file of the host."""
        answer: Operation = self._json(
            "POST",
            "/v1/import",
            body={
                "format": format,
                "key": key,
                "name": name,
                "path": path,
            },
        )
        return answer

    def limit(
        self,
        name: Name,
        *,
        read: list[str] | None = None,
        write: list[str] | None = None,
    ) -> TrustEntry:
        """Set which refs a trusted host may use."""
        answer: TrustEntry = self._json(
            "PUT",
            f"/v1/trust/{quote(name)}",
            body={
                "read": read,
                "write": write,
            },
        )
        return answer

    def log(self, capsule: CapsuleRef) -> list[CapsuleInfo]:
        """A capsule and its ancestors, newest first."""
        answer: list[CapsuleInfo] = self._json("GET", f"/v1/capsules/{quote(capsule)}/log")
        return answer

    def machine(self, name: Name) -> MachineInfo:
        """One machine."""
        answer: MachineInfo = self._json("GET", f"/v1/machines/{quote(name)}")
        return answer

    def machines(self) -> list[MachineInfo]:
        """All machines."""
        answer: list[MachineInfo] = self._json("GET", "/v1/machines")
        return answer

    def match_golden(self, *, terms: Terms, host: Name | None = None) -> GoldenMatch:
        """Find the golden capsule that fits best."""
        answer: GoldenMatch = self._json("POST", "/v1/match", body={"host": host, "terms": terms})
        return answer

    def metrics(self) -> str:
        """Figures of the host and its machines, in the text format of Prometheus."""
        return self._text("GET", "/metrics")

    def migrate(
        self,
        name: Name,
        *,
        host: Name,
        adaptive: bool | None = None,
        downtime_max_ms: int | None = None,
        free_caches: bool | None = None,
        mode: MigrateMode | None = None,
        network: MoveNetwork | None = None,
        no_stun: bool | None = None,
        rate_max: int | None = None,
        rate_min: int | None = None,
        rate_step: int | None = None,
        rounds: int | None = None,
        safe: Name | None = None,
        throttle: int | None = None,
        time_max_ms: int | None = None,
    ) -> Operation:
        """Migrate a machine to another host."""
        answer: Operation = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/migrate",
            body={
                "adaptive": adaptive,
                "downtime_max_ms": downtime_max_ms,
                "free_caches": free_caches,
                "host": host,
                "mode": mode,
                "network": network,
                "no_stun": no_stun,
                "rate_max": rate_max,
                "rate_min": rate_min,
                "rate_step": rate_step,
                "rounds": rounds,
                "safe": safe,
                "throttle": throttle,
                "time_max_ms": time_max_ms,
            },
        )
        return answer

    def migrations(self) -> list[MigrationRecord]:
        """Past migrations from this host, newest first."""
        answer: list[MigrationRecord] = self._json("GET", "/v1/migrations")
        return answer

    def network(self, name: Name) -> NetworkInfo:
        """One network; published ports are tried."""
        answer: NetworkInfo = self._json("GET", f"/v1/networks/{quote(name)}")
        return answer

    def network_hosts(
        self,
        name: Name,
        *,
        share: list[Name] | None = None,
        unshare: list[Name] | None = None,
    ) -> NetworkInfo:
        """Share a network with other hosts, or no longer."""
        answer: NetworkInfo = self._json(
            "POST",
            f"/v1/networks/{quote(name)}/hosts",
            body={
                "share": share,
                "unshare": unshare,
            },
        )
        return answer

    def networks(self) -> list[NetworkInfo]:
        """Managed networks."""
        answer: list[NetworkInfo] = self._json("GET", "/v1/networks")
        return answer

    def openapi(self) -> Any:
        """This document."""
        return self._json("GET", "/v1/openapi.json")

    def operation(self, id: int) -> Operation:
        """One operation."""
        answer: Operation = self._json("GET", f"/v1/operations/{quote(id)}")
        return answer

    def operations(self) -> list[Operation]:
        """Operations that run or have ended recently."""
        answer: list[Operation] = self._json("GET", "/v1/operations")
        return answer

    def outdated(self, capsule: CapsuleRef, *, onto: CapsuleRef | None = None) -> OutdatedReport:
        """Machines and capsules that are based on old versions of a capsule."""
        answer: OutdatedReport = self._json(
            "GET",
            f"/v1/capsules/{quote(capsule)}/rebase",
            query={
                "onto": onto,
            },
        )
        return answer

    def pause(self, name: Name) -> MachineInfo:
        """Pause the CPUs of a machine."""
        answer: MachineInfo = self._json("POST", f"/v1/machines/{quote(name)}/pause")
        return answer

    def pools(self) -> list[PoolInfo]:
        """Pools that the host knows; their managers are asked."""
        answer: list[PoolInfo] = self._json("GET", "/v1/pools")
        return answer

    def ports(
        self,
        name: Name,
        *,
        publish: list[PortRequest] | None = None,
        unpublish: list[HostPort] | None = None,
    ) -> list[PublishedPort]:
        """Publish ports of a machine on the host, or no longer; the answer has all of its ports."""
        answer: list[PublishedPort] = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/ports",
            body={
                "publish": publish,
                "unpublish": unpublish,
            },
        )
        return answer

    def promote(
        self,
        *,
        capsule: CapsuleRef,
        all_refs: bool | None = None,
        tag: Name | None = None,
    ) -> PromoteReport:
        """Detach a capsule from its parents."""
        answer: PromoteReport = self._json(
            "POST",
            "/v1/promote",
            body={
                "all_refs": all_refs,
                "capsule": capsule,
                "tag": tag,
            },
        )
        return answer

    def protect(
        self,
        name: Name,
        *,
        host: Name,
        block: ProtectBlock | None = None,
        epoch_ms: int | None = None,
        group: str | None = None,
        keep: SnapshotRule | None = None,
        lease_ms: int | None = None,
        mode: ProtectMode | None = None,
        rate_max: int | None = None,
        spares: list[Name] | None = None,
        stretch: int | None = None,
        then: Name | None = None,
        witness: str | None = None,
    ) -> Operation:
        """Replicate a running machine to a standby on another host."""
        answer: Operation = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/protect",
            body={
                "block": block,
                "epoch_ms": epoch_ms,
                "group": group,
                "host": host,
                "keep": keep,
                "lease_ms": lease_ms,
                "mode": mode,
                "rate_max": rate_max,
                "spares": spares,
                "stretch": stretch,
                "then": then,
                "witness": witness,
            },
        )
        return answer

    def pull(
        self,
        *,
        capsule: CapsuleRef,
        host: Name | None = None,
        lazy: bool | None = None,
        pool: str | None = None,
        tag: Name | None = None,
    ) -> Operation:
        """Fetch a capsule."""
        answer: Operation = self._json(
            "POST",
            "/v1/pull",
            body={
                "capsule": capsule,
                "host": host,
                "lazy": lazy,
                "pool": pool,
                "tag": tag,
            },
        )
        return answer

    def pull_image(self, *, name: str) -> Operation:
        """Fetch an image of a distribution from a source, as a capsule."""
        answer: Operation = self._json("POST", "/v1/images", body={"name": name})
        return answer

    def push(
        self,
        *,
        subject: CapsuleRef,
        balloon: BalloonTarget | None = None,
        follow: bool | None = None,
        host: Name | None = None,
        pool: str | None = None,
        unfollow: bool | None = None,
    ) -> Operation:
        """Send a machine or a capsule to another host or to a pool."""
        answer: Operation = self._json(
            "POST",
            "/v1/push",
            body={
                "balloon": balloon,
                "follow": follow,
                "host": host,
                "pool": pool,
                "subject": subject,
                "unfollow": unfollow,
            },
        )
        return answer

    def read_file(
        self,
        name: Name,
        *,
        length: int,
        path: str,
        offset: int | None = None,
    ) -> FileContent:
        """Read a part of a file in the guest, through qemu-ga."""
        answer: FileContent = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/files/read",
            body={
                "length": length,
                "offset": offset,
                "path": path,
            },
        )
        return answer

    def remote(self, host: Name) -> list[RemoteCapsule]:
        """Capsules that a trusted host offers."""
        answer: list[RemoteCapsule] = self._json("GET", f"/v1/remote/{quote(host)}")
        return answer

    def remove(self, capsule: CapsuleRef) -> PreviousCapsule:
        """Remove a ref; the next gc deletes capsules without refs."""
        answer: PreviousCapsule = self._json("DELETE", f"/v1/capsules/{quote(capsule)}")
        return answer

    def rename(self, name: Name, *, to: Name) -> MachineInfo:
        """Give a machine that is off or suspended another name."""
        answer: MachineInfo = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/rename",
            body={
                "to": to,
            },
        )
        return answer

    def repair(
        self,
        *,
        capsule: CapsuleRef | None = None,
        host: Name | None = None,
        pool: str | None = None,
    ) -> Operation:
        """Fetch damaged and missing objects of capsules from other hosts or a pool."""
        answer: Operation = self._json(
            "POST",
            "/v1/store/repair",
            body={
                "capsule": capsule,
                "host": host,
                "pool": pool,
            },
        )
        return answer

    def resolve(self, name: Name, *, decision: HandoverDecision | None = None) -> None:
        """Decide who has a machine that is between two hosts."""
        self._json("POST", f"/v1/machines/{quote(name)}/resolve", body={"decision": decision})

    def resume(
        self,
        *,
        capsule: CapsuleRef,
        host: Name | None = None,
        mode: ResumeMode | None = None,
        name: Name | None = None,
        network: MoveNetwork | None = None,
        pool: str | None = None,
        reclaim: bool | None = None,
        then_full: bool | None = None,
    ) -> Operation:
        """Create a machine from a capsule."""
        answer: Operation = self._json(
            "POST",
            "/v1/resume",
            body={
                "capsule": capsule,
                "host": host,
                "mode": mode,
                "name": name,
                "network": network,
                "pool": pool,
                "reclaim": reclaim,
                "then_full": then_full,
            },
        )
        return answer

    def revoke_token(self, name: Name) -> None:
        """Revoke a token; streams that it opened end."""
        self._json("DELETE", f"/v1/tokens/{quote(name)}")

    def rewind(self, name: Name, *, capsule: CapsuleRef) -> Operation:
        """Take a machine back to an earlier capsule and keep its present state."""
        answer: Operation = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/rewind",
            body={
                "capsule": capsule,
            },
        )
        return answer

    def run(
        self,
        *,
        memory: int,
        name: Name,
        accel: str | None = None,
        append: str | None = None,
        boot_order: BootOrder | None = None,
        cdroms: list[str] | None = None,
        cloud_init: CloudInit | None = None,
        cpu: str | None = None,
        cpus: int | None = None,
        devices: str | None = None,
        disks: list[DiskSource] | None = None,
        display: bool | None = None,
        initrd: str | None = None,
        kernel: str | None = None,
        new_disks: list[int] | None = None,
        nics: list[NicRequest] | None = None,
        profile: Profile | None = None,
        publish: list[PortRequest] | None = None,
        secure_boot: bool | None = None,
        self_service: SelfService | None = None,
        settings: MachineSettings | None = None,
        tpm: bool | None = None,
    ) -> MachineInfo:
        """Create a machine and start it."""
        answer: MachineInfo = self._json(
            "POST",
            "/v1/machines",
            body={
                "accel": accel,
                "append": append,
                "boot_order": boot_order,
                "cdroms": cdroms,
                "cloud_init": cloud_init,
                "cpu": cpu,
                "cpus": cpus,
                "devices": devices,
                "disks": disks,
                "display": display,
                "initrd": initrd,
                "kernel": kernel,
                "memory": memory,
                "name": name,
                "new_disks": new_disks,
                "nics": nics,
                "profile": profile,
                "publish": publish,
                "secure_boot": secure_boot,
                "self_service": self_service,
                "settings": settings,
                "tpm": tpm,
            },
        )
        return answer

    def run_schedule(self, name: Name, *, dry_run: bool | None = None) -> ScheduleReport:
        """Run a schedule now, or say what it would remove; the answer comes at its end."""
        answer: ScheduleReport = self._json(
            "POST",
            f"/v1/schedules/{quote(name)}/run",
            body={
                "dry_run": dry_run,
            },
        )
        return answer

    def schedule(self, name: Name) -> ScheduleInfo:
        """One schedule, with its last runs and its capsules."""
        answer: ScheduleInfo = self._json("GET", f"/v1/schedules/{quote(name)}")
        return answer

    def schedules(self) -> list[ScheduleInfo]:
        """Work that the daemon does by itself."""
        answer: list[ScheduleInfo] = self._json("GET", "/v1/schedules")
        return answer

    def seal(self) -> Operation:
        """Encrypt what the store had before it was encrypted."""
        answer: Operation = self._json("POST", "/v1/store/seal")
        return answer

    def sessions(self) -> list[SessionInfo]:
        """Sessions that root has mounted on the host."""
        answer: list[SessionInfo] = self._json("GET", "/v1/sessions")
        return answer

    def set(
        self,
        name: Name,
        *,
        autostart: Autostart | None = None,
        hardware: HardwareChange | None = None,
        labels: dict[str, str | None] | None = None,
        note: str | None = None,
        restart: RestartRule | None = None,
    ) -> MachineInfo:
        """Change when a machine starts by itself, its labels, its note and its hardware."""
        answer: MachineInfo = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/settings",
            body={
                "autostart": autostart,
                "hardware": hardware,
                "labels": labels,
                "note": note,
                "restart": restart,
            },
        )
        return answer

    def start(self, name: Name) -> MachineInfo:
        """Start a stopped or crashed machine from its own disks."""
        answer: MachineInfo = self._json("POST", f"/v1/machines/{quote(name)}/start")
        return answer

    def stop(
        self,
        name: Name,
        *,
        force: bool | None = None,
        mode: StopMode | None = None,
        timeout_s: int | None = None,
    ) -> MachineInfo:
        """Stop a machine; the answer comes once it has stopped."""
        answer: MachineInfo = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/stop",
            body={
                "force": force,
                "mode": mode,
                "timeout_s": timeout_s,
            },
        )
        return answer

    def suspend(
        self,
        name: Name,
        *,
        balloon: BalloonTarget | None = None,
        tag: Name | None = None,
    ) -> Operation:
        """Save the state of a machine as a capsule and end the machine."""
        answer: Operation = self._json(
            "POST",
            f"/v1/machines/{quote(name)}/suspend",
            body={
                "balloon": balloon,
                "tag": tag,
            },
        )
        return answer

    def tag(self, tag: Name, *, capsule: CapsuleRef) -> Tagged:
        """Give a capsule a tag."""
        answer: Tagged = self._json("PUT", f"/v1/tags/{quote(tag)}", body={"capsule": capsule})
        return answer

    def tokens(self) -> list[TokenInfo]:
        """Tokens of the API."""
        answer: list[TokenInfo] = self._json("GET", "/v1/tokens")
        return answer

    def trust(
        self,
        *,
        name: Name,
        address: str | None = None,
        key: str | None = None,
        read: list[str] | None = None,
        write: list[str] | None = None,
    ) -> TrustEntry:
        """Trust a host; its name and key must be new."""
        answer: TrustEntry = self._json(
            "POST",
            "/v1/trust",
            body={
                "address": address,
                "key": key,
                "name": name,
                "read": read,
                "write": write,
            },
        )
        return answer

    def trusted(self) -> list[TrustEntry]:
        """Trusted hosts."""
        answer: list[TrustEntry] = self._json("GET", "/v1/trust")
        return answer

    def unpause(self, name: Name) -> MachineInfo:
        """Continue a paused machine."""
        answer: MachineInfo = self._json("POST", f"/v1/machines/{quote(name)}/unpause")
        return answer

    def unprotect(self, name: Name) -> MachineInfo:
        """Stop protecting a machine."""
        answer: MachineInfo = self._json("DELETE", f"/v1/machines/{quote(name)}/protect")
        return answer

    def upgrade(self, name: Name) -> MachineInfo:
        """Take a running machine from the process that serves it, which may be of an earlier
        version.
        """
        answer: MachineInfo = self._json("POST", f"/v1/machines/{quote(name)}/upgrade")
        return answer

    def usage(self) -> list[MachineUsage]:
        """Processor time, memory and traffic of all machines that have processes."""
        answer: list[MachineUsage] = self._json("GET", "/v1/usage")
        return answer

    def verify(self) -> Operation:
        """Read and check everything in the store."""
        answer: Operation = self._json("POST", "/v1/store/verify")
        return answer

    def write_file(self, name: Name, *, data: str, path: str, offset: int | None = None) -> None:
        """Write a part of a file in the guest, through qemu-ga."""
        self._json(
            "POST",
            f"/v1/machines/{quote(name)}/files/write",
            body={
                "data": data,
                "offset": offset,
                "path": path,
            },
        )


class AsyncCalls(ABC):
    """Calls of the API, to be awaited."""

    @abstractmethod
    async def _json(self, method: str, path: str, *, query: Any = None, body: Any = None) -> Any: ...

    @abstractmethod
    async def _text(self, method: str, path: str, *, query: Any = None) -> str: ...

    async def balloon(self, name: Name, *, size: int) -> MachineInfo:
        """Change the memory size of a guest with its balloon."""
        answer: MachineInfo = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/balloon",
            body={
                "size": size,
            },
        )
        return answer

    async def bucket(
        self,
        *,
        bucket: str,
        gc: bool | None = None,
        untag: Name | None = None,
        verify: bool | None = None,
    ) -> Operation:
        """List or verify a bucket, remove a name there, or delete objects that no name needs."""
        answer: Operation = await self._json(
            "POST",
            "/v1/buckets",
            body={
                "bucket": bucket,
                "gc": gc,
                "untag": untag,
                "verify": verify,
            },
        )
        return answer

    async def cache(self) -> CacheInfo:
        """State of the hash cache."""
        answer: CacheInfo = await self._json("GET", "/v1/cache")
        return answer

    async def cache_add(
        self,
        *,
        forget: bool | None = None,
        machine: Name | None = None,
        path: str | None = None,
    ) -> Operation:
        """Index the pages of a file, so that transfers can skip them."""
        answer: Operation = await self._json(
            "POST",
            "/v1/cache",
            body={
                "forget": forget,
                "machine": machine,
                "path": path,
            },
        )
        return answer

    async def caller(self) -> CallerInfo:
        """Who calls, and the calls that are allowed."""
        answer: CallerInfo = await self._json("GET", "/v1/caller")
        return answer

    async def cancel(self, id: int) -> Operation:
        """Cancel an operation; its last state says what it left."""
        answer: Operation = await self._json("DELETE", f"/v1/operations/{quote(id)}")
        return answer

    async def capsule(self, capsule: CapsuleRef) -> CapsuleInfo:
        """One capsule."""
        answer: CapsuleInfo = await self._json("GET", f"/v1/capsules/{quote(capsule)}")
        return answer

    async def capsules(self) -> list[CapsuleInfo]:
        """All capsules, newest first."""
        answer: list[CapsuleInfo] = await self._json("GET", "/v1/capsules")
        return answer

    async def change_master_key(self, *, key_file: str) -> StoreEncryption:
        """Change the master key of an encrypted store."""
        answer: StoreEncryption = await self._json(
            "PUT",
            "/v1/store/key",
            body={
                "key_file": key_file,
            },
        )
        return answer

    async def checkpoint(
        self,
        name: Name,
        *,
        balloon: BalloonTarget | None = None,
        disks_only: bool | None = None,
        labels: dict[str, str] | None = None,
        quiesce: bool | None = None,
        tag: Name | None = None,
    ) -> Operation:
        """Save the state of a running machine as a capsule."""
        answer: Operation = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/checkpoint",
            body={
                "balloon": balloon,
                "disks_only": disks_only,
                "labels": labels,
                "quiesce": quiesce,
                "tag": tag,
            },
        )
        return answer

    async def clone(
        self,
        *,
        capsule: CapsuleRef,
        count: int,
        mode: ResumeMode | None = None,
        network: CloneNetwork | None = None,
        prefix: Name | None = None,
    ) -> Operation:
        """Create several machines from a capsule."""
        answer: Operation = await self._json(
            "POST",
            "/v1/clone",
            body={
                "capsule": capsule,
                "count": count,
                "mode": mode,
                "network": network,
                "prefix": prefix,
            },
        )
        return answer

    async def console_log(self, name: Name, *, bytes: int | None = None) -> str:
        """End of the console log of a machine."""
        return await self._text(
            "GET",
            f"/v1/machines/{quote(name)}/console/log",
            query={
                "bytes": bytes,
            },
        )

    async def cpu_baseline(self, *, hosts: list[Name] | None = None) -> CpuBaseline:
        """Find the CPU model that this host and others have in common."""
        answer: CpuBaseline = await self._json("POST", "/v1/cpu/baseline", body={"hosts": hosts})
        return answer

    async def create_network(
        self,
        *,
        name: str,
        isolated: bool | None = None,
        subnet: str | None = None,
        subnet6: str | None = None,
    ) -> NetworkInfo:
        """Create a network with a bridge, addresses, names and a way out."""
        answer: NetworkInfo = await self._json(
            "POST",
            "/v1/networks",
            body={
                "isolated": isolated,
                "name": name,
                "subnet": subnet,
                "subnet6": subnet6,
            },
        )
        return answer

    async def create_schedule(
        self,
        *,
        every_ms: int,
        name: Name,
        work: ScheduledWork,
        offset_ms: int | None = None,
    ) -> ScheduleInfo:
        """Create a schedule."""
        answer: ScheduleInfo = await self._json(
            "POST",
            "/v1/schedules",
            body={
                "every_ms": every_ms,
                "name": name,
                "offset_ms": offset_ms,
                "work": work,
            },
        )
        return answer

    async def create_token(
        self,
        *,
        name: Name,
        role: Role,
        capsules: list[str] | None = None,
        expires_s: int | None = None,
        machines: list[str] | None = None,
    ) -> NewToken:
        """Create a token; its text is in no other answer."""
        answer: NewToken = await self._json(
            "POST",
            "/v1/tokens",
            body={
                "capsules": capsules,
                "expires_s": expires_s,
                "machines": machines,
                "name": name,
                "role": role,
            },
        )
        return answer

    async def delete(self, name: Name, *, unreadable: bool | None = None) -> None:
        """Delete a stopped or crashed machine and the changes on its disks."""
        await self._json("DELETE", f"/v1/machines/{quote(name)}", query={"unreadable": unreadable})

    async def delete_network(self, name: Name) -> None:
        """Delete a network that no machine uses."""
        await self._json("DELETE", f"/v1/networks/{quote(name)}")

    async def delete_schedule(self, name: Name) -> None:
        """Delete a schedule; its capsules stay."""
        await self._json("DELETE", f"/v1/schedules/{quote(name)}")

    async def derive(
        self,
        *,
        capsule: CapsuleRef,
        name: Name,
        append: str | None = None,
        cloud_init: CloudInit | None = None,
        cpu: str | None = None,
        cpus: int | None = None,
        disk_size: int | None = None,
        display: bool | None = None,
        memory: int | None = None,
        nics: list[NicRequest] | None = None,
        profile: Profile | None = None,
        publish: list[PortRequest] | None = None,
        secure_boot: bool | None = None,
        settings: MachineSettings | None = None,
        tpm: bool | None = None,
    ) -> MachineInfo:
        """Create a machine that boots from the disks of a capsule."""
        answer: MachineInfo = await self._json(
            "POST",
            "/v1/derive",
            body={
                "append": append,
                "capsule": capsule,
                "cloud_init": cloud_init,
                "cpu": cpu,
                "cpus": cpus,
                "disk_size": disk_size,
                "display": display,
                "memory": memory,
                "name": name,
                "nics": nics,
                "profile": profile,
                "publish": publish,
                "secure_boot": secure_boot,
                "settings": settings,
                "tpm": tpm,
            },
        )
        return answer

    async def diff(self, capsule: CapsuleRef, other: CapsuleRef) -> CapsuleDiff:
        """Differences between two capsules."""
        answer: CapsuleDiff = await self._json(
            "GET",
            f"/v1/capsules/{quote(capsule)}/diff/{quote(other)}",
        )
        return answer

    async def display(self, name: Name) -> None:
        """Screen, keyboard and pointer of a machine (RFB), with `Upgrade: whimbrel-display`, or as
        a WebSocket with that subprotocol.
        """
        await self._json("GET", f"/v1/machines/{quote(name)}/display")

    async def distrust(self, name: Name) -> None:
        """Remove a trusted host."""
        await self._json("DELETE", f"/v1/trust/{quote(name)}")

    async def encryption(self) -> StoreEncryption:
        """How the store is encrypted."""
        answer: StoreEncryption = await self._json("GET", "/v1/store/encryption")
        return answer

    async def evacuate(
        self,
        *,
        dry_run: bool | None = None,
        host: Name | None = None,
        parallel: int | None = None,
        rate_max: int | None = None,
        sample_ms: int | None = None,
        stop_on_failure: bool | None = None,
        to: list[Name] | None = None,
    ) -> Operation:
        """Migrate all machines of a host to other hosts."""
        answer: Operation = await self._json(
            "POST",
            "/v1/evacuate",
            body={
                "dry_run": dry_run,
                "host": host,
                "parallel": parallel,
                "rate_max": rate_max,
                "sample_ms": sample_ms,
                "stop_on_failure": stop_on_failure,
                "to": to,
            },
        )
        return answer

    async def exec(
        self,
        name: Name,
        *,
        command: list[str],
        env: list[str] | None = None,
        input: str | None = None,
        timeout_s: int | None = None,
    ) -> ExecResult:
        """Run a program in the guest, through qemu-ga; the answer comes at its end."""
        answer: ExecResult = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/exec",
            body={
                "command": command,
                "env": env,
                "input": input,
                "timeout_s": timeout_s,
            },
        )
        return answer

    async def export(
        self,
        *,
        capsule: CapsuleRef,
        format: ExportFormat,
        path: str,
        image: str | None = None,
        key: str | None = None,
    ) -> Operation:
        """Write a capsule or an image to a file of the host."""
        answer: Operation = await self._json(
            "POST",
            "/v1/export",
            body={
                "capsule": capsule,
                "format": format,
                "image": image,
                "key": key,
                "path": path,
            },
        )
        return answer

    async def failover(
        self,
        name: Name,
        *,
        force: bool | None = None,
        primary_is_dead: bool | None = None,
    ) -> Operation:
        """Switch a machine over to its standby."""
        answer: Operation = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/failover",
            body={
                "force": force,
                "primary_is_dead": primary_is_dead,
            },
        )
        return answer

    async def family(self, capsule: CapsuleRef) -> list[GraphNode]:
        """A capsule, its ancestors and its descendants, parents first."""
        answer: list[GraphNode] = await self._json("GET", f"/v1/capsules/{quote(capsule)}/graph")
        return answer

    async def gc(self) -> Operation:
        """Delete objects that no ref needs."""
        answer: Operation = await self._json("POST", "/v1/store/gc")
        return answer

    async def graph(self) -> list[GraphNode]:
        """All capsules, parents first."""
        answer: list[GraphNode] = await self._json("GET", "/v1/graph")
        return answer

    async def history(self, name: Name) -> list[RefVersion]:
        """Earlier capsules of a ref, newest first."""
        answer: list[RefVersion] = await self._json("GET", f"/v1/refs/{quote(name)}/history")
        return answer

    async def host(self) -> HostInfo:
        """The host."""
        answer: HostInfo = await self._json("GET", "/v1/host")
        return answer

    async def hosts(self) -> list[HostMachines]:
        """Machines and room of this host and of the hosts that it trusts, which are asked."""
        answer: list[HostMachines] = await self._json("GET", "/v1/hosts")
        return answer

    async def images(self) -> ImageOffers:
        """Images of distributions that the sources of the host offer."""
        answer: ImageOffers = await self._json("GET", "/v1/images")
        return answer

    async def import_(
        self,
        *,
        format: ImportFormat,
        name: Name,
        path: str,
        key: str | None = None,
    ) -> Operation:
        """Read a capsule or a disk from a file of the host."""
        answer: Operation = await self._json(
            "POST",
            "/v1/import",
            body={
                "format": format,
                "key": key,
                "name": name,
                "path": path,
            },
        )
        return answer

    async def limit(
        self,
        name: Name,
        *,
        read: list[str] | None = None,
        write: list[str] | None = None,
    ) -> TrustEntry:
        """Set which refs a trusted host may use."""
        answer: TrustEntry = await self._json(
            "PUT",
            f"/v1/trust/{quote(name)}",
            body={
                "read": read,
                "write": write,
            },
        )
        return answer

    async def log(self, capsule: CapsuleRef) -> list[CapsuleInfo]:
        """A capsule and its ancestors, newest first."""
        answer: list[CapsuleInfo] = await self._json("GET", f"/v1/capsules/{quote(capsule)}/log")
        return answer

    async def machine(self, name: Name) -> MachineInfo:
        """One machine."""
        answer: MachineInfo = await self._json("GET", f"/v1/machines/{quote(name)}")
        return answer

    async def machines(self) -> list[MachineInfo]:
        """All machines."""
        answer: list[MachineInfo] = await self._json("GET", "/v1/machines")
        return answer

    async def match_golden(self, *, terms: Terms, host: Name | None = None) -> GoldenMatch:
        """Find the golden capsule that fits best."""
        answer: GoldenMatch = await self._json(
            "POST",
            "/v1/match",
            body={
                "host": host,
                "terms": terms,
            },
        )
        return answer

    async def metrics(self) -> str:
        """Figures of the host and its machines, in the text format of Prometheus."""
        return await self._text("GET", "/metrics")

    async def migrate(
        self,
        name: Name,
        *,
        host: Name,
        adaptive: bool | None = None,
        downtime_max_ms: int | None = None,
        free_caches: bool | None = None,
        mode: MigrateMode | None = None,
        network: MoveNetwork | None = None,
        no_stun: bool | None = None,
        rate_max: int | None = None,
        rate_min: int | None = None,
        rate_step: int | None = None,
        rounds: int | None = None,
        safe: Name | None = None,
        throttle: int | None = None,
        time_max_ms: int | None = None,
    ) -> Operation:
        """Migrate a machine to another host."""
        answer: Operation = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/migrate",
            body={
                "adaptive": adaptive,
                "downtime_max_ms": downtime_max_ms,
                "free_caches": free_caches,
                "host": host,
                "mode": mode,
                "network": network,
                "no_stun": no_stun,
                "rate_max": rate_max,
                "rate_min": rate_min,
                "rate_step": rate_step,
                "rounds": rounds,
                "safe": safe,
                "throttle": throttle,
                "time_max_ms": time_max_ms,
            },
        )
        return answer

    async def migrations(self) -> list[MigrationRecord]:
        """Past migrations from this host, newest first."""
        answer: list[MigrationRecord] = await self._json("GET", "/v1/migrations")
        return answer

    async def network(self, name: Name) -> NetworkInfo:
        """One network; published ports are tried."""
        answer: NetworkInfo = await self._json("GET", f"/v1/networks/{quote(name)}")
        return answer

    async def network_hosts(
        self,
        name: Name,
        *,
        share: list[Name] | None = None,
        unshare: list[Name] | None = None,
    ) -> NetworkInfo:
        """Share a network with other hosts, or no longer."""
        answer: NetworkInfo = await self._json(
            "POST",
            f"/v1/networks/{quote(name)}/hosts",
            body={
                "share": share,
                "unshare": unshare,
            },
        )
        return answer

    async def networks(self) -> list[NetworkInfo]:
        """Managed networks."""
        answer: list[NetworkInfo] = await self._json("GET", "/v1/networks")
        return answer

    async def openapi(self) -> Any:
        """This document."""
        return await self._json("GET", "/v1/openapi.json")

    async def operation(self, id: int) -> Operation:
        """One operation."""
        answer: Operation = await self._json("GET", f"/v1/operations/{quote(id)}")
        return answer

    async def operations(self) -> list[Operation]:
        """Operations that run or have ended recently."""
        answer: list[Operation] = await self._json("GET", "/v1/operations")
        return answer

    async def outdated(
        self,
        capsule: CapsuleRef,
        *,
        onto: CapsuleRef | None = None,
    ) -> OutdatedReport:
        """Machines and capsules that are based on old versions of a capsule."""
        answer: OutdatedReport = await self._json(
            "GET",
            f"/v1/capsules/{quote(capsule)}/rebase",
            query={
                "onto": onto,
            },
        )
        return answer

    async def pause(self, name: Name) -> MachineInfo:
        """Pause the CPUs of a machine."""
        answer: MachineInfo = await self._json("POST", f"/v1/machines/{quote(name)}/pause")
        return answer

    async def pools(self) -> list[PoolInfo]:
        """Pools that the host knows; their managers are asked."""
        answer: list[PoolInfo] = await self._json("GET", "/v1/pools")
        return answer

    async def ports(
        self,
        name: Name,
        *,
        publish: list[PortRequest] | None = None,
        unpublish: list[HostPort] | None = None,
    ) -> list[PublishedPort]:
        """Publish ports of a machine on the host, or no longer; the answer has all of its ports."""
        answer: list[PublishedPort] = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/ports",
            body={
                "publish": publish,
                "unpublish": unpublish,
            },
        )
        return answer

    async def promote(
        self,
        *,
        capsule: CapsuleRef,
        all_refs: bool | None = None,
        tag: Name | None = None,
    ) -> PromoteReport:
        """Detach a capsule from its parents."""
        answer: PromoteReport = await self._json(
            "POST",
            "/v1/promote",
            body={
                "all_refs": all_refs,
                "capsule": capsule,
                "tag": tag,
            },
        )
        return answer

    async def protect(
        self,
        name: Name,
        *,
        host: Name,
        block: ProtectBlock | None = None,
        epoch_ms: int | None = None,
        group: str | None = None,
        keep: SnapshotRule | None = None,
        lease_ms: int | None = None,
        mode: ProtectMode | None = None,
        rate_max: int | None = None,
        spares: list[Name] | None = None,
        stretch: int | None = None,
        then: Name | None = None,
        witness: str | None = None,
    ) -> Operation:
        """Replicate a running machine to a standby on another host."""
        answer: Operation = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/protect",
            body={
                "block": block,
                "epoch_ms": epoch_ms,
                "group": group,
                "host": host,
                "keep": keep,
                "lease_ms": lease_ms,
                "mode": mode,
                "rate_max": rate_max,
                "spares": spares,
                "stretch": stretch,
                "then": then,
                "witness": witness,
            },
        )
        return answer

    async def pull(
        self,
        *,
        capsule: CapsuleRef,
        host: Name | None = None,
        lazy: bool | None = None,
        pool: str | None = None,
        tag: Name | None = None,
    ) -> Operation:
        """Fetch a capsule."""
        answer: Operation = await self._json(
            "POST",
            "/v1/pull",
            body={
                "capsule": capsule,
                "host": host,
                "lazy": lazy,
                "pool": pool,
                "tag": tag,
            },
        )
        return answer

    async def pull_image(self, *, name: str) -> Operation:
        """Fetch an image of a distribution from a source, as a capsule."""
        answer: Operation = await self._json("POST", "/v1/images", body={"name": name})
        return answer

    async def push(
        self,
        *,
        subject: CapsuleRef,
        balloon: BalloonTarget | None = None,
        follow: bool | None = None,
        host: Name | None = None,
        pool: str | None = None,
        unfollow: bool | None = None,
    ) -> Operation:
        """Send a machine or a capsule to another host or to a pool."""
        answer: Operation = await self._json(
            "POST",
            "/v1/push",
            body={
                "balloon": balloon,
                "follow": follow,
                "host": host,
                "pool": pool,
                "subject": subject,
                "unfollow": unfollow,
            },
        )
        return answer

    async def read_file(
        self,
        name: Name,
        *,
        length: int,
        path: str,
        offset: int | None = None,
    ) -> FileContent:
        """Read a part of a file in the guest, through qemu-ga."""
        answer: FileContent = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/files/read",
            body={
                "length": length,
                "offset": offset,
                "path": path,
            },
        )
        return answer

    async def remote(self, host: Name) -> list[RemoteCapsule]:
        """Capsules that a trusted host offers."""
        answer: list[RemoteCapsule] = await self._json("GET", f"/v1/remote/{quote(host)}")
        return answer

    async def remove(self, capsule: CapsuleRef) -> PreviousCapsule:
        """Remove a ref; the next gc deletes capsules without refs."""
        answer: PreviousCapsule = await self._json("DELETE", f"/v1/capsules/{quote(capsule)}")
        return answer

    async def rename(self, name: Name, *, to: Name) -> MachineInfo:
        """Give a machine that is off or suspended another name."""
        answer: MachineInfo = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/rename",
            body={
                "to": to,
            },
        )
        return answer

    async def repair(
        self,
        *,
        capsule: CapsuleRef | None = None,
        host: Name | None = None,
        pool: str | None = None,
    ) -> Operation:
        """Fetch damaged and missing objects of capsules from other hosts or a pool."""
        answer: Operation = await self._json(
            "POST",
            "/v1/store/repair",
            body={
                "capsule": capsule,
                "host": host,
                "pool": pool,
            },
        )
        return answer

    async def resolve(self, name: Name, *, decision: HandoverDecision | None = None) -> None:
        """Decide who has a machine that is between two hosts."""
        await self._json("POST", f"/v1/machines/{quote(name)}/resolve", body={"decision": decision})

    async def resume(
        self,
        *,
        capsule: CapsuleRef,
        host: Name | None = None,
        mode: ResumeMode | None = None,
        name: Name | None = None,
        network: MoveNetwork | None = None,
        pool: str | None = None,
        reclaim: bool | None = None,
        then_full: bool | None = None,
    ) -> Operation:
        """Create a machine from a capsule."""
        answer: Operation = await self._json(
            "POST",
            "/v1/resume",
            body={
                "capsule": capsule,
                "host": host,
                "mode": mode,
                "name": name,
                "network": network,
                "pool": pool,
                "reclaim": reclaim,
                "then_full": then_full,
            },
        )
        return answer

    async def revoke_token(self, name: Name) -> None:
        """Revoke a token; streams that it opened end."""
        await self._json("DELETE", f"/v1/tokens/{quote(name)}")

    async def rewind(self, name: Name, *, capsule: CapsuleRef) -> Operation:
        """Take a machine back to an earlier capsule and keep its present state."""
        answer: Operation = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/rewind",
            body={
                "capsule": capsule,
            },
        )
        return answer

    async def run(
        self,
        *,
        memory: int,
        name: Name,
        accel: str | None = None,
        append: str | None = None,
        boot_order: BootOrder | None = None,
        cdroms: list[str] | None = None,
        cloud_init: CloudInit | None = None,
        cpu: str | None = None,
        cpus: int | None = None,
        devices: str | None = None,
        disks: list[DiskSource] | None = None,
        display: bool | None = None,
        initrd: str | None = None,
        kernel: str | None = None,
        new_disks: list[int] | None = None,
        nics: list[NicRequest] | None = None,
        profile: Profile | None = None,
        publish: list[PortRequest] | None = None,
        secure_boot: bool | None = None,
        self_service: SelfService | None = None,
        settings: MachineSettings | None = None,
        tpm: bool | None = None,
    ) -> MachineInfo:
        """Create a machine and start it."""
        answer: MachineInfo = await self._json(
            "POST",
            "/v1/machines",
            body={
                "accel": accel,
                "append": append,
                "boot_order": boot_order,
                "cdroms": cdroms,
                "cloud_init": cloud_init,
                "cpu": cpu,
                "cpus": cpus,
                "devices": devices,
                "disks": disks,
                "display": display,
                "initrd": initrd,
                "kernel": kernel,
                "memory": memory,
                "name": name,
                "new_disks": new_disks,
                "nics": nics,
                "profile": profile,
                "publish": publish,
                "secure_boot": secure_boot,
                "self_service": self_service,
                "settings": settings,
                "tpm": tpm,
            },
        )
        return answer

    async def run_schedule(self, name: Name, *, dry_run: bool | None = None) -> ScheduleReport:
        """Run a schedule now, or say what it would remove; the answer comes at its end."""
        answer: ScheduleReport = await self._json(
            "POST",
            f"/v1/schedules/{quote(name)}/run",
            body={
                "dry_run": dry_run,
            },
        )
        return answer

    async def schedule(self, name: Name) -> ScheduleInfo:
        """One schedule, with its last runs and its capsules."""
        answer: ScheduleInfo = await self._json("GET", f"/v1/schedules/{quote(name)}")
        return answer

    async def schedules(self) -> list[ScheduleInfo]:
        """Work that the daemon does by itself."""
        answer: list[ScheduleInfo] = await self._json("GET", "/v1/schedules")
        return answer

    async def seal(self) -> Operation:
        """Encrypt what the store had before it was encrypted."""
        answer: Operation = await self._json("POST", "/v1/store/seal")
        return answer

    async def sessions(self) -> list[SessionInfo]:
        """Sessions that root has mounted on the host."""
        answer: list[SessionInfo] = await self._json("GET", "/v1/sessions")
        return answer

    async def set(
        self,
        name: Name,
        *,
        autostart: Autostart | None = None,
        hardware: HardwareChange | None = None,
        labels: dict[str, str | None] | None = None,
        note: str | None = None,
        restart: RestartRule | None = None,
    ) -> MachineInfo:
        """Change when a machine starts by itself, its labels, its note and its hardware."""
        answer: MachineInfo = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/settings",
            body={
                "autostart": autostart,
                "hardware": hardware,
                "labels": labels,
                "note": note,
                "restart": restart,
            },
        )
        return answer

    async def start(self, name: Name) -> MachineInfo:
        """Start a stopped or crashed machine from its own disks."""
        answer: MachineInfo = await self._json("POST", f"/v1/machines/{quote(name)}/start")
        return answer

    async def stop(
        self,
        name: Name,
        *,
        force: bool | None = None,
        mode: StopMode | None = None,
        timeout_s: int | None = None,
    ) -> MachineInfo:
        """Stop a machine; the answer comes once it has stopped."""
        answer: MachineInfo = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/stop",
            body={
                "force": force,
                "mode": mode,
                "timeout_s": timeout_s,
            },
        )
        return answer

    async def suspend(
        self,
        name: Name,
        *,
        balloon: BalloonTarget | None = None,
        tag: Name | None = None,
    ) -> Operation:
        """Save the state of a machine as a capsule and end the machine."""
        answer: Operation = await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/suspend",
            body={
                "balloon": balloon,
                "tag": tag,
            },
        )
        return answer

    async def tag(self, tag: Name, *, capsule: CapsuleRef) -> Tagged:
        """Give a capsule a tag."""
        answer: Tagged = await self._json(
            "PUT",
            f"/v1/tags/{quote(tag)}",
            body={
                "capsule": capsule,
            },
        )
        return answer

    async def tokens(self) -> list[TokenInfo]:
        """Tokens of the API."""
        answer: list[TokenInfo] = await self._json("GET", "/v1/tokens")
        return answer

    async def trust(
        self,
        *,
        name: Name,
        address: str | None = None,
        key: str | None = None,
        read: list[str] | None = None,
        write: list[str] | None = None,
    ) -> TrustEntry:
        """Trust a host; its name and key must be new."""
        answer: TrustEntry = await self._json(
            "POST",
            "/v1/trust",
            body={
                "address": address,
                "key": key,
                "name": name,
                "read": read,
                "write": write,
            },
        )
        return answer

    async def trusted(self) -> list[TrustEntry]:
        """Trusted hosts."""
        answer: list[TrustEntry] = await self._json("GET", "/v1/trust")
        return answer

    async def unpause(self, name: Name) -> MachineInfo:
        """Continue a paused machine."""
        answer: MachineInfo = await self._json("POST", f"/v1/machines/{quote(name)}/unpause")
        return answer

    async def unprotect(self, name: Name) -> MachineInfo:
        """Stop protecting a machine."""
        answer: MachineInfo = await self._json("DELETE", f"/v1/machines/{quote(name)}/protect")
        return answer

    async def upgrade(self, name: Name) -> MachineInfo:
        """Take a running machine from the process that serves it, which may be of an earlier
        version.
        """
        answer: MachineInfo = await self._json("POST", f"/v1/machines/{quote(name)}/upgrade")
        return answer

    async def usage(self) -> list[MachineUsage]:
        """Processor time, memory and traffic of all machines that have processes."""
        answer: list[MachineUsage] = await self._json("GET", "/v1/usage")
        return answer

    async def verify(self) -> Operation:
        """Read and check everything in the store."""
        answer: Operation = await self._json("POST", "/v1/store/verify")
        return answer

    async def write_file(
        self,
        name: Name,
        *,
        data: str,
        path: str,
        offset: int | None = None,
    ) -> None:
        """Write a part of a file in the guest, through qemu-ga."""
        await self._json(
            "POST",
            f"/v1/machines/{quote(name)}/files/write",
            body={
                "data": data,
                "offset": offset,
                "path": path,
            },
        )


__all__ = ["AsyncCalls", "Calls"]

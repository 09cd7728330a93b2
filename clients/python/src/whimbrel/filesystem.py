"""File system of a checkpoint pool for fsspec: `whimbrel://blast/step40/rank0`.

    import fsspec

    with fsspec.open("whimbrel://blast/step40/rank0", "wb", pool="10.0.0.1:7500/KEY") as file:
        file.write(state)                                    # visible when it is closed, as a whole

The pool is reached through a mount: the one that `mount` names, or one that this process makes by the program
`whimbrel` and that ends with it. `WHIMBREL_POOL_MOUNT` and `WHIMBREL_POOL` in the environment replace the
options `mount` and `pool`, so that a program which knows only a URL finds its pool.

A file that could not be committed is an error of its `close`: `OSError` with the number of the system.

Files that belong together are a group: they appear together or not at all.

    files = PoolFileSystem(pool="10.0.0.1:7500/KEY")
    folder = files.begin_group("blast/step40", 4)            # one process, before
    files.pipe_file(f"{folder}/rank0", state)                # each one its file
    files.commit_group("blast/step40")                       # one process, when all are done
"""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from ._error import WhimbrelError

# Seconds for which a mount is waited for, and for which it may write what is open when the process ends.
PATIENCE = 60


class MountError(WhimbrelError):
    """The pool could not be mounted."""


class GroupError(WhimbrelError):
    """A group of files could not be begun, committed or abandoned."""


class _Mount:
    """A mount that this process has made."""

    def __init__(self, command: list[str]) -> None:
        self.folder = tempfile.mkdtemp(prefix="whimbrel-pool-")
        # Fork leaves the mount to the process that made it.
        self._owner = os.getpid()
        with tempfile.TemporaryFile() as errors:
            try:
                self._process = subprocess.Popen(
                    [*command[:3], self.folder, *command[3:]],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            except OSError as error:
                Path(self.folder).rmdir()
                raise MountError(f"cannot start {command[0]}: {error}") from error
            output = self._process.stdout
            told = output.readline() if output else b""
            if not told:
                self._process.wait()
                Path(self.folder).rmdir()
                errors.seek(0)
                text = errors.read().decode(errors="replace").strip()
                raise MountError(f"the pool cannot be mounted: {text or 'the program has ended'}")
        atexit.register(self.end)

    def is_there(self) -> bool:
        return self._owner != os.getpid() or self._process.poll() is None

    def end(self) -> None:
        if self._owner != os.getpid():
            return
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not os.path.ismount(self.folder):
            Path(self.folder).rmdir()


_mounts: dict[tuple[str, ...], _Mount] = {}
_lock = threading.Lock()


def _mounted(command: list[str]) -> str:
    """The folder of a mount by this command, made once."""
    with _lock:
        found = _mounts.get(tuple(command))
        if found is None or not found.is_there():
            found = _mounts[tuple(command)] = _Mount(command)
        return found.folder


def _table() -> list[tuple[str, str, str]]:
    """Folders where something is mounted, the source, and which folder of it: proc_pid_mountinfo(5)."""
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        here, _, there = line.partition(" - ")
        words = (here.split()[4], there.split()[1], here.split()[3])
        folder, source, root = (
            re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), word) for word in words
        )
        mounts.append((folder, source, root))
    return mounts


def _pool_at(folder: str) -> tuple[str, str]:
    """The managers of the pool that is mounted at a folder or above it, and the folder's path in the pool."""
    folder = os.path.realpath(folder)
    around = [one for one in _table() if os.path.commonpath([one[0], folder]) == one[0]]
    # Of two mounts on one folder, the later one is seen.
    top, source, root = max(reversed(around), key=lambda one: len(one[0]), default=("", "", ""))
    if not source.startswith("pool:"):
        raise MountError(f"{folder} is in no mount of a pool")
    return source.removeprefix("pool:"), f"{root}/{os.path.relpath(folder, top)}".removesuffix("/.").strip(
        "/"
    )


class PoolFileSystem(DirFileSystem):  # type: ignore[misc]
    """Files of a pool.

    Parameters
    ----------
    mount
        Folder on which the pool is mounted already.
    pool
        Otherwise its managers, `HOST:PORT/KEY`, separated by commas: this process mounts it.
    keys_dir, secret
        Folder of the own key, and file of the secret that encrypts, for a mount by this process. Groups need
        the key too.
    program
        The program that mounts, and begins and commits groups.
    """

    protocol = "whimbrel"
    root_marker = ""

    def __init__(
        self,
        mount: str | os.PathLike[str] | None = None,
        pool: str | None = None,
        keys_dir: str | os.PathLike[str] | None = None,
        secret: str | os.PathLike[str] | None = None,
        program: str = "whimbrel",
        **options: Any,
    ) -> None:
        self._program = program
        self._keys = ["--keys-dir", os.fspath(keys_dir)] if keys_dir else []
        if mount is None and pool is None:
            mount, pool = os.environ.get("WHIMBREL_POOL_MOUNT"), os.environ.get("WHIMBREL_POOL")
        if mount is None:
            if pool is None:
                raise MountError("name the pool: `pool` or `mount`, WHIMBREL_POOL or WHIMBREL_POOL_MOUNT")
            command = [program, "mount", f"pool:{pool}"]
            command += self._keys
            command += ["--secret", os.fspath(secret)] if secret else []
            mount = _mounted(command)
        elif not os.path.isdir(mount):
            raise MountError(f"{os.fspath(mount)} is no folder")
        super().__init__(path=os.fspath(mount), fs=LocalFileSystem(auto_mkdir=True), **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = os.fspath(path)
        return text.removeprefix("whimbrel://").removeprefix("whimbrel:").strip("/")

    def _join(self, path: Any) -> Any:
        joined = super()._join(path)
        # A slash at the end says that a target is a folder.
        return f"{joined}/" if isinstance(path, str) and path.rstrip("/") and path.endswith("/") else joined

    def versions(self, path: str) -> list[str]:
        """The versions of a file, oldest first, as paths that can be opened for reading."""
        folder, _, name = self._strip_protocol(path).rpartition("/")
        versions = "/".join(part for part in (folder, ".versions", name) if part)
        return sorted(self.ls(versions, detail=False), key=lambda one: int(one.rpartition("/")[2]))

    def begin_group(self, path: str, files: int, job: str = "") -> str:
        """Begins a group of files that appear at `path` together, and returns the folder to write them to.

        `files` is the least number of files that it has. What was begun there before and not committed is
        removed. With a `job`, a commit removes earlier groups of the job in the same folder that were never
        committed.
        """
        path = self._strip_protocol(path)
        above, _, _ = path.rpartition("/")
        self.makedirs(above, exist_ok=True)
        told = self._group("begin", path, "--files", str(files), "--job", job)
        return "/".join(part for part in (above, told.rpartition("/")[2]) if part)

    def commit_group(self, path: str) -> None:
        """Makes a group visible as a whole. Refused if files are missing."""
        self._group("commit", self._strip_protocol(path))

    def abandon_group(self, path: str) -> None:
        """Removes a group that was not committed."""
        self._group("abandon", self._strip_protocol(path))

    def _group(self, action: str, path: str, *options: str) -> str:
        managers, above = _pool_at(self.path)
        where = "/".join(part for part in (above, path) if part)
        command = [self._program, "pool", "group", action, f"/{where}", *options, *self._keys]
        for manager in managers.split(","):
            command += ["--manager", manager]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise GroupError(f"cannot start {command[0]}: {error}") from error
        if done.returncode != 0:
            raise GroupError(f"cannot {action} the group {path}: {done.stderr.strip()}")
        return done.stdout.strip()

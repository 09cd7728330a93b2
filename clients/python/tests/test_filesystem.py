"""The file system of a pool by the test suite of fsspec, on a real mount, and what is its own.

`WHIMBREL_TEST_PROGRAM` is the program, which runs a manager, two benefactors and the mount: as root, or where
users may mount by FUSE. Without it everything here is left out.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
from fsspec.tests import abstract

from whimbrel.filesystem import MountError, PoolFileSystem

PROGRAM = os.environ.get("WHIMBREL_TEST_PROGRAM", "")
PATIENCE = 120

pytestmark = pytest.mark.skipif(not PROGRAM, reason="wants WHIMBREL_TEST_PROGRAM")


@dataclass
class Pool:
    """A pool that runs, mounted."""

    manager: str
    keys: Path
    mount: Path


def run(*arguments: str | Path) -> str:
    done = subprocess.run([PROGRAM, *map(str, arguments)], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def states(manager: str, keys: Path) -> list[str]:
    status = json.loads(run("--json", "pool", "status", "--manager", manager, "--keys-dir", keys))
    return [one["state"] for one in status["benefactors"]]


def free_address() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("pool")
    keys, data, mount = folder / "keys", folder / "manager", folder / "mnt"
    mount.mkdir()
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path) -> str:
        command = [PROGRAM, *map(str, arguments)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        output = running[-1].stdout
        line = output.readline().strip() if output else ""
        assert line, f"{arguments} ended"
        return line

    try:
        run("pool", "key", "--data", data)
        run("pool", "admit", "--data", data, "me", run("pool", "key", "--data", keys))
        manager = start("pool", "manager", "--data", data, "--listen", free_address())
        for name in ("b0", "b1"):
            own = folder / name
            run("pool", "admit", "--data", data, name, run("pool", "key", "--data", own))
            room = ("--capacity", "2G", "--keep-free", "0")
            start(
                "pool",
                "benefactor",
                "--name",
                name,
                "--data",
                own,
                *room,
                "--listen",
                free_address(),
                "--manager",
                manager,
            )
        deadline = time.monotonic() + PATIENCE
        while states(manager, keys) != ["online", "online"]:
            assert time.monotonic() < deadline, "the benefactors did not come"
            time.sleep(0.1)
        start("mount", f"pool:{manager}", mount, "--keys-dir", keys)
        yield Pool(manager, keys, mount)
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(PATIENCE)


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, pool: Pool) -> PoolFileSystem:
        return PoolFileSystem(mount=pool.mount)

    @pytest.fixture
    def fs_path(self, pool: Pool) -> Iterator[str]:
        files = PoolFileSystem(mount=pool.mount)
        files.makedirs("suite")
        yield "suite"
        files.rm("suite", recursive=True)


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass


@pytest.fixture
def folder(pool: Pool) -> Iterator[str]:
    files = PoolFileSystem(mount=pool.mount)
    files.makedirs("own")
    yield "own"
    files.rm("own", recursive=True)


def test_a_url_finds_the_mount_of_the_environment(
    pool: Pool, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHIMBREL_POOL_MOUNT", str(pool.mount))
    with fsspec.open(f"whimbrel://{folder}/state", "wb") as file:
        file.write(b"state")
    with fsspec.open(f"whimbrel://{folder}/state", "rb") as file:
        assert file.read() == b"state"
    files, path = fsspec.url_to_fs(f"whimbrel://{folder}/state")
    assert path == f"{folder}/state"
    assert files.info(path)["name"] == path
    assert files.size(path) == 5
    assert fsspec.open_files(f"whimbrel://{folder}/*")[0].path == path


def test_a_file_is_there_when_it_is_closed_and_its_versions_stay(pool: Pool, folder: str) -> None:
    files, path = PoolFileSystem(mount=pool.mount), f"{folder}/state"
    file = files.open(path, "wb")
    file.write(b"one")
    assert not PoolFileSystem(mount=pool.mount, skip_instance_cache=True).ls(folder)
    file.close()
    files.pipe_file(path, b"second")
    versions = files.versions(f"whimbrel://{path}")
    assert [files.cat_file(one) for one in versions] == [b"one", b"second"]
    assert files.cat_file(path, 1, 3) == b"ec"
    files.mv(path, f"{folder}/moved")
    assert files.ls(folder, detail=False) == [f"{folder}/moved"]


def read(files: PoolFileSystem, path: str) -> bytes:
    return bytes(files.cat_file(path))


def test_other_processes_read_through_the_mount_and_by_one_of_their_own(pool: Pool, folder: str) -> None:
    own = PoolFileSystem(pool=pool.manager, keys_dir=pool.keys, program=PROGRAM)
    own.pipe_file(f"{folder}/state", b"state")
    assert PoolFileSystem(mount=pool.mount).cat_file(f"{folder}/state") == b"state"
    assert pickle.loads(pickle.dumps(own)).path == own.path, "one mount for a process"
    for way in ("fork", "spawn"):
        with multiprocessing.get_context(way).Pool(2) as workers:
            assert workers.starmap(read, [(own, f"{folder}/state")] * 2) == [b"state"] * 2
    assert own.cat_file(f"{folder}/state") == b"state", "the mount outlives those that were forked"


def test_what_is_no_pool_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHIMBREL_POOL_MOUNT", raising=False)
    monkeypatch.delenv("WHIMBREL_POOL", raising=False)
    with pytest.raises(MountError, match="name the pool"):
        PoolFileSystem(skip_instance_cache=True)
    with pytest.raises(MountError, match="no folder"):
        PoolFileSystem(mount="/nowhere/at/all")
    with pytest.raises(MountError, match="cannot start"):
        PoolFileSystem(pool="127.0.0.1:1/key", program="/nowhere/whimbrel")
    with pytest.raises(MountError, match="cannot be mounted"):
        PoolFileSystem(pool="nonsense", program=PROGRAM)

"""The file system of a pool by the test suite of fsspec, on a real mount, and what is its own.

`WHIMBREL_TEST_PROGRAM` is the program, which runs a manager, two benefactors and the mount: as root, or where
users may mount by FUSE. Without it everything here is left out.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator

import fsspec
import pytest
from fsspec.tests import abstract
from pools import PROGRAM, Pool

from whimbrel.filesystem import GroupError, MountError, PoolFileSystem

pytestmark = pytest.mark.skipif(not PROGRAM, reason="wants WHIMBREL_TEST_PROGRAM")


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


def test_files_of_a_group_appear_together(pool: Pool, folder: str) -> None:
    files = PoolFileSystem(mount=pool.mount, keys_dir=pool.keys, program=PROGRAM)
    below = PoolFileSystem(mount=pool.mount / folder, keys_dir=pool.keys, program=PROGRAM)
    hidden = files.begin_group(f"whimbrel://{folder}/run/step1", 2)
    files.pipe_file(f"{hidden}/rank0", b"0")
    assert not files.exists(f"{folder}/run/step1")
    with pytest.raises(GroupError, match="cannot commit"):
        files.commit_group(f"{folder}/run/step1")
    files.pipe_file(f"{hidden}/rank1", b"1")
    below.commit_group("run/step1")
    assert [files.cat_file(f"{folder}/run/step1/rank{rank}") for rank in range(2)] == [b"0", b"1"]
    below.begin_group("run/step2", 1)
    below.abandon_group("run/step2")
    assert below.ls("run", detail=False) == ["run/step1"]
    with pytest.raises(MountError, match="no mount of a pool"):
        PoolFileSystem(mount="/").begin_group("step1", 1)

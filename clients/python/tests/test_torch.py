"""Checkpoints of `torch.distributed.checkpoint` in a pool, by jobs of several processes, some of them killed.

Left out without `WHIMBREL_TEST_PROGRAM` (`pools.py`), and where PyTorch is not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pools import PROGRAM, Pool, free_address, run

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import SavePlan

from whimbrel.filesystem import GroupError, PoolFileSystem
from whimbrel.torch_checkpoint import PoolReader, PoolWriter

pytestmark = pytest.mark.skipif(not PROGRAM, reason="wants WHIMBREL_TEST_PROGRAM")

JOB = Path(__file__).with_name("torch_job.py")
PATIENCE = 180


@pytest.fixture
def files(pool: Pool) -> Iterator[PoolFileSystem]:
    files = PoolFileSystem(mount=pool.mount, keys_dir=pool.keys, program=PROGRAM)
    yield files
    if files.exists("job"):
        files.rm("job", recursive=True)


def ranks(pool: Pool, count: int, *arguments: str) -> list[tuple[int, str]]:
    """Runs a job of so many ranks: how each ended, and what it said."""
    host, _, port = free_address().partition(":")
    # The ranks find the pool as any program does that knows an URL only.
    settings = {"WHIMBREL_POOL_MOUNT": str(pool.mount), "XDG_CONFIG_HOME": str(pool.keys.parent / "config")}
    settings |= {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    # Not every build of PyTorch has libuv.
    settings["USE_LIBUV"] = "0"
    settings["PATH"] = f"{pool.keys.parent / 'bin'}:{os.environ['PATH']}"
    prepare(pool)
    running = [
        subprocess.Popen(
            [sys.executable, JOB, *arguments],
            env={**os.environ, **settings, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    ended = []
    for process in running:
        output, _ = process.communicate(timeout=PATIENCE)
        ended.append((process.returncode, output))
    return ended


def prepare(pool: Pool) -> None:
    """Puts the program and the key where they are when nobody names them."""
    home = pool.keys.parent
    for link, target in (
        (home / "bin" / "whimbrel", Path(PROGRAM)),
        (home / "config" / "whimbrel", pool.keys),
    ):
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(target.resolve())


def well(ended: list[tuple[int, str]]) -> None:
    assert [code for code, _ in ended] == [0] * len(ended), "\n".join(output for _, output in ended)


def test_a_checkpoint_of_four_ranks_is_loaded_by_others(pool: Pool, files: PoolFileSystem) -> None:
    well(ranks(pool, 4, "save", "whimbrel://job/step1", "--step", "1"))
    found = sorted(Path(one).name for one in files.ls("job/step1", detail=False))
    assert found == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]
    for count in (4, 3, 1):
        well(ranks(pool, count, "load", "whimbrel://job/step1", "--step", "1"))
    group = run("pool", "group", "ls", "/job", "--manager", pool.manager, "--keys-dir", pool.keys)
    assert "complete" in group
    assert "/job" in group


@pytest.mark.parametrize(
    ("victim", "moment"), [(3, "write"), (2, "written"), (1, "soon"), (0, "write"), (0, "finish")]
)
def test_if_a_rank_is_killed_nothing_appears(
    pool: Pool, files: PoolFileSystem, victim: int, moment: str
) -> None:
    well(ranks(pool, 4, "save", "whimbrel://job/step1", "--step", "1"))
    killed = ("--victim", str(victim), "--moment", moment)
    ended = ranks(pool, 4, "save", "whimbrel://job/step2", "--step", "2", *killed)
    assert ended[victim][0] == -9, ended[victim][1]
    assert all(code != 0 for code, _ in ended), "no rank takes it for saved"
    assert not files.exists("job/step2")
    assert [one for one in files.ls("job", detail=False) if "/." not in one] == ["job/step1"]
    # The job starts again from what is there, and saves the step again.
    well(ranks(pool, 4, "load", "whimbrel://job/step1", "--step", "1"))
    well(ranks(pool, 4, "save", "whimbrel://job/step2", "--step", "2"))
    well(ranks(pool, 2, "load", "whimbrel://job/step2", "--step", "2"))
    assert files.ls("job", detail=False) == ["job/step1", "job/step2"]


def test_what_a_killed_job_wrote_goes_with_the_next_step(pool: Pool, files: PoolFileSystem) -> None:
    ranks(pool, 4, "save", "whimbrel://job/step1", "--step", "1", "--victim", "3", "--moment", "write")
    assert files.ls("job", detail=False) == ["job/.step1.group"]
    well(ranks(pool, 4, "save", "whimbrel://job/step2", "--step", "2"))
    assert files.ls("job", detail=False) == ["job/step2"]


def saved(state: dict[str, Any], url: str, writer: PoolWriter) -> None:
    dcp.async_save(state, checkpoint_id=url, storage_writer=writer).result(PATIENCE)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of this process only."""
    host, _, port = free_address().partition(":")
    for name, value in (
        ("MASTER_ADDR", host),
        ("MASTER_PORT", port),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("USE_LIBUV", "0"),
    ):
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("gloo")
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_memory_of_the_copy_is_used_again_unless_the_state_differs(files: PoolFileSystem) -> None:
    writer = PoolWriter(files=files, thread_count=2)
    state: dict[str, Any] = {"a": torch.arange(10.0), "more": [torch.ones(3), "text"], "step": 1}
    writer.prepare(state)
    memory = writer._rooms[0].data_ptr()
    saved(state, "whimbrel://job/step1", writer)
    state["a"] += 1
    saved(state, "whimbrel://job/step2", writer)
    assert writer._rooms[0].data_ptr() == memory
    # A shape that PyTorch would spread over the old one.
    state["a"] = torch.ones(1)
    saved(state, "whimbrel://job/step3", writer)
    for step, there in ((1, torch.arange(10.0)), (2, torch.arange(10.0) + 1), (3, torch.ones(1))):
        loaded = {"a": torch.zeros_like(there), "more": [torch.zeros(3), ""], "step": 0}
        dcp.load(loaded, checkpoint_id=f"whimbrel://job/step{step}", storage_reader=PoolReader(files=files))
        assert torch.equal(loaded["a"], there)
        assert loaded["more"][1] == "text"
    memory = writer.stage(state)["a"].data_ptr()
    assert writer.stage(state)["a"].data_ptr() != memory, "the copy has a reader"


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_that_is_there_is_not_written_again(files: PoolFileSystem) -> None:
    writer, state = PoolWriter(job="4711", files=files), {"a": torch.ones(3)}
    dcp.save(state, checkpoint_id="whimbrel://job/step1", storage_writer=writer)
    # PyTorch 2.6 cannot pass an error on in Python 3.13, and raises another one.
    with pytest.raises((dcp.api.CheckpointException, TypeError)):
        dcp.save({"a": torch.zeros(3)}, checkpoint_id="whimbrel://job/step1", storage_writer=writer)
    loaded = {"a": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id="whimbrel://job/step1", storage_reader=PoolReader(files=files))
    assert torch.equal(loaded["a"], state["a"])
    with pytest.raises(GroupError, match="cannot begin the group job/step1"):
        writer.prepare_global_plan([SavePlan([])])
    with pytest.raises(ValueError, match="name the checkpoint"):
        PoolWriter(files=files).prepare_global_plan([SavePlan([])])
    with pytest.raises(GroupError, match="cannot commit"):
        files.commit_group("job/step7")

"""One rank of a job that `test_torch.py` runs: `torch_job.py ACTION URL [--victim RANK --moment MOMENT]`.

The rank, the number of ranks, and where they meet are in the environment, as torchrun has it.

`save` saves asynchronously and changes the state at once, as training would. `load` loads with any number of
ranks and compares with the arrays that were saved. A victim is killed by SIGKILL at its moment.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from whimbrel.torch_checkpoint import PoolReader, PoolWriter

# Uneven: no number of ranks divides it.
ROWS, COLUMNS = 1003, 4096


def arrays(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """What the state of a step is."""
    chance = np.random.default_rng(step)
    return {
        "weight": chance.standard_normal((ROWS, COLUMNS), dtype=np.float32),
        "moment": chance.integers(-100, 100, (ROWS, 3), dtype=np.int64),
        "bias": chance.standard_normal(COLUMNS),
    }


def state_of(values: dict[str, np.ndarray[Any, Any]], step: int) -> dict[str, Any]:
    """The state with two tensors in shards and one that each rank has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {name: torch.from_numpy(value.copy()) for name, value in values.items()}
    return {
        "model": {
            "weight": distribute_tensor(whole["weight"], mesh, [Shard(0)]),
            "bias": whole["bias"],
        },
        "optimizer": {"moment": distribute_tensor(whole["moment"], mesh, [Shard(0)]), "step": step},
    }


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class MortalWriter(PoolWriter):
    """A writer that is killed."""

    moment = ""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.moment == "write":
            # Dies with half of its file written.
            path = self.fs.concat_path(self._path_of(plan.storage_data.folder), "__half.distcp")
            with open(path, "wb") as file:
                file.write(bytes(4 << 20))
                file.flush()
                die()
        written = super().write_data(plan, planner)
        if self.moment == "written":
            die()
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        if self.moment == "finish":
            # Dies when everything is written, and before the commit.
            FileSystemWriter.finish(self, metadata, results)
            die()
        super().finish(metadata, results)


def save(url: str, step: int, moment: str) -> None:
    state = state_of(arrays(step), step)
    writer = MortalWriter()
    writer.prepare(state)
    writer.moment = moment
    # Training talks in a group of its own.
    saving = dcp.async_save(
        state, checkpoint_id=url, storage_writer=writer, process_group=dist.new_group(backend="gloo")
    )
    state["model"]["weight"].to_local().zero_()
    state["model"]["bias"].fill_(7)
    if moment == "soon":
        threading.Timer(0.02, die).start()
    saving.result()


def load(url: str, step: int) -> None:
    expected = arrays(step)
    state = state_of({name: np.zeros_like(value) for name, value in expected.items()}, 0)
    dcp.load(state, checkpoint_id=url, storage_reader=PoolReader())
    for name, there in (
        ("weight", state["model"]["weight"].full_tensor()),
        ("bias", state["model"]["bias"]),
        ("moment", state["optimizer"]["moment"].full_tensor()),
    ):
        assert np.array_equal(there.numpy(), expected[name]), f"{name} differs"
    assert state["optimizer"]["step"] == step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["save", "load"])
    parser.add_argument("url")
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--victim", type=int, default=-1)
    parser.add_argument("--moment", default="")
    told = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    if told.action == "load":
        load(told.url, told.step)
    else:
        save(told.url, told.step, told.moment if dist.get_rank() == told.victim else "")
    # Gloo may wait for itself when it is ended (PyTorch 2.6), and there is nothing left to do.
    os._exit(0)


if __name__ == "__main__":
    main()

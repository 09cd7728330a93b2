"""How long a training stands still for a checkpoint: `dcp.py FOLDER RANKS MIB TIMES`.

RANKS processes have MIB MiB of tensors in shards, and save them by torch.distributed.checkpoint: to the pool
(`WHIMBREL_POOL_MOUNT`) and to FOLDER on a local disk, asynchronously and synchronously. A save counts from
the call until it returns, on the rank where that takes longest. One line of JSON says the seconds of each
way, and how long it took until the checkpoint was complete.

After each save the state changes, as by training. A last one is loaded from the
pool and compared with what was saved.
"""

import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from whimbrel.torch_checkpoint import PoolReader, PoolWriter

COLUMNS = 4096
# Beside the weights, their average and the two moments of the optimizer.
PARTS = ("weight", "average", "first", "second")
LAYERS = 8


def new_state(mib: int) -> dict:
    """Tensors of so many MiB of all ranks together, each with a part of every one."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    rows = (mib << 20) // (len(PARTS) * LAYERS * ranks * COLUMNS * 4)
    torch.manual_seed(dist.get_rank())

    def shard() -> DTensor:
        return DTensor.from_local(torch.randn(rows, COLUMNS), mesh, [Shard(0)], run_check=False)

    return {part: {f"layer{layer}": shard() for layer in range(LAYERS)} for part in PARTS}


def locals_of(state: dict) -> list[torch.Tensor]:
    return [tensor.to_local() for part in state.values() for tensor in part.values()]


def train(state: dict) -> None:
    """Changes every number."""
    for tensor in locals_of(state):
        tensor.mul_(0.9).add_(0.01)


class DiskWriter(dcp.FileSystemWriter):
    """PyTorch's own writer, which copies before it saves: that of 2.6 takes tensors on a CPU as they are, and
    saves what training has made of them meanwhile."""

    def stage(self, state: dict) -> dict:
        return {part: {name: one.clone() for name, one in tensors.items()} for part, tensors in state.items()}


def longest(seconds: float) -> float:
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def measured(state: dict, save) -> tuple[float, float]:
    """Seconds for which a save blocks, and until it is complete."""
    dist.barrier()
    begun = time.perf_counter()
    saving = save()
    blocked = time.perf_counter() - begun
    train(state)
    if saving is not None:
        saving.result()
    complete = time.perf_counter() - begun
    return longest(blocked), longest(complete)


def series(state: dict, times: int, save) -> dict:
    """The first save, and those after it."""
    pairs = [measured(state, lambda number=number: save(number)) for number in range(times + 1)]
    blocked, complete = zip(*pairs, strict=True)
    return {"first": blocked[0], "blocked": blocked[1:], "complete": complete[1:]}


def rank(folder: str, mib: int, times: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    # Training talks in a group of its own.
    group = dist.new_group(backend="gloo")
    state = new_state(mib)
    writer = PoolWriter()

    def save_by(writer: dcp.FileSystemWriter, way, where: str):
        def save(number: int):
            path = f"{where}/step{number}"
            return way(state, checkpoint_id=path, storage_writer=writer, process_group=group)

        return save

    def sync(*told, **named) -> None:
        dcp.save(*told, **named)

    disk = DiskWriter(folder)
    figures = {
        "pool": series(state, times, save_by(writer, dcp.async_save, "whimbrel://async")),
        "pool_sync": series(state, times, save_by(writer, sync, "whimbrel://sync")),
        "disk": series(state, times, save_by(disk, dcp.async_save, f"{folder}/async")),
        "disk_sync": series(state, times, save_by(disk, sync, f"{folder}/sync")),
    }
    check(state, writer, group)
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    dist.barrier()
    # Gloo may wait for itself when it is ended (PyTorch 2.6), and there is nothing left to do.
    os._exit(0)


def check(state: dict, writer: PoolWriter, group) -> None:
    """One more, which is loaded again."""
    saved = [tensor.numpy().copy() for tensor in locals_of(state)]
    url = "whimbrel://async/last"
    saving = dcp.async_save(state, checkpoint_id=url, storage_writer=writer, process_group=group)
    train(state)
    saving.result()
    dcp.load(state, checkpoint_id=url, storage_reader=PoolReader(), process_group=group)
    for there, then in zip(locals_of(state), saved, strict=True):
        assert np.array_equal(there.numpy(), then), "something else came back"


def main() -> int:
    folder, ranks, mib, times = sys.argv[1], *map(int, sys.argv[2:5])
    if "RANK" in os.environ:
        rank(folder, mib, times)
        return 0
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    settings |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Debian builds PyTorch without libuv.
    settings["USE_LIBUV"] = "0"
    started = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **settings, "RANK": str(number)})
        for number in range(ranks)
    ]
    return max(abs(process.wait()) for process in started)


if __name__ == "__main__":
    sys.exit(main())

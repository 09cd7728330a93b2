"""Checkpoints of `torch.distributed.checkpoint` in a pool, which appear as a whole or not at all.

    import torch.distributed.checkpoint as dcp
    from whimbrel.torch_checkpoint import PoolReader, PoolWriter

    writer = PoolWriter()                                    # every rank, once
    saving = dcp.async_save(state, checkpoint_id="whimbrel://job/step40", storage_writer=writer)
    ...                                                      # training goes on
    saving.result()                                          # step40 is there, with the files of all ranks
    dcp.load(state, checkpoint_id="whimbrel://job/step40", storage_reader=PoolReader())

The files of all ranks are a group of the pool. The coordinator begins it, writes the metadata last and then
commits it. If a rank dies, nothing appears, and the earlier checkpoints stay as they are. What was written
for it is removed when the step is begun again, or when a later step of the job is committed.

Use one writer for all saves: it retains the memory of a copy of the state, so that only the first save has to
get memory from the system. `prepare` does that before the training begins.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
from itertools import zip_longest
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .filesystem import PoolFileSystem


def _is_ours(checkpoint_id: Any) -> bool:
    return str(checkpoint_id).startswith(f"{PoolFileSystem.protocol}://")


def _local(tensor: Any) -> Any:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _room_for(leaf: Any, old: Any) -> Any:
    """Memory for a copy of a tensor: the old one if it fits. What is no tensor is copied."""
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    local, spec = _local(leaf), getattr(leaf, "_spec", None)
    if isinstance(old, torch.Tensor) and getattr(old, "_spec", None) == spec:
        there = _local(old)
        if (there.shape, there.dtype) == (local.shape, local.dtype):
            return old
    room = torch.empty(local.shape, dtype=local.dtype, pin_memory=torch.cuda.is_available())
    return room if spec is None else DTensor(room, spec, requires_grad=False)


@dataclasses.dataclass
class _Place:
    """What the coordinator tells a rank: the folder of the group, and what PyTorch itself tells."""

    folder: str
    told: Any


class PoolWriter(FileSystemWriter):
    """Writes checkpoints to a pool.

    Parameters
    ----------
    path
        `whimbrel://job/step40`, if the calls of `torch.distributed.checkpoint` do not name it.
    job
        Steps of a job that never were complete are removed by the commit of a later one. Without it, the
        folder of the steps is the job.
    thread_count
        Files that each rank writes at a time.
    files
        The file system, of options other than those of the environment.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        job: str = "",
        thread_count: int = 1,
        files: PoolFileSystem | None = None,
    ) -> None:
        self._files = files or PoolFileSystem()
        self._job = job
        self._goal = ""
        self._rooms: list[Any] = []
        # Set while nobody reads the copy of the state.
        self._free = threading.Event()
        self._free.set()
        # A file of the pool is durable when it is closed: no sync beside that.
        super().__init__(self._files.path, sync_files=False, thread_count=thread_count)
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset()
        if checkpoint_id is not None:
            self._goal = self._files._strip_protocol(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_ours(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        return f"{PoolFileSystem.protocol}://{self._goal}"

    def prepare(self, state_dict: Any) -> None:
        """Gets the memory that saves of this state need, so that the first one is as fast as the others."""
        self.stage(state_dict)
        self._free.set()

    def stage(self, state_dict: Any) -> Any:
        """A copy of the state, which training does not change."""
        self.per_thread_copy_ahead = 0
        leaves, structure = tree_flatten(state_dict)
        # The copy of a save that still runs, or has failed, may have a reader.
        old = self._rooms[: len(leaves)] if self._free.is_set() else []
        self._free.clear()
        self._rooms = [_room_for(leaf, room) for leaf, room in zip_longest(leaves, old)]
        with torch.no_grad():
            for leaf, room in zip(leaves, self._rooms, strict=True):
                if isinstance(leaf, torch.Tensor):
                    _local(room).copy_(_local(leaf), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return tree_unflatten(self._rooms, structure)

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        if not self._goal:
            raise ValueError("name the checkpoint: checkpoint_id='whimbrel://job/step40'")
        job = self._job or f"/{self._goal.rpartition('/')[0]}"
        # One file of each rank at least, and the metadata.
        folder = self._files.begin_group(self._goal, len(plans) + 1, job)
        self.path = self._path_of(folder)
        return [
            dataclasses.replace(plan, storage_data=_Place(folder, plan.storage_data))
            for plan in super().prepare_global_plan(plans)
        ]

    def write_data(self, plan: Any, planner: Any) -> Any:
        place: _Place = plan.storage_data
        self.path = self._path_of(place.folder)
        try:
            return super().write_data(dataclasses.replace(plan, storage_data=place.told), planner)
        finally:
            self._free.set()

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        self._files.commit_group(self._goal)

    def _path_of(self, folder: str) -> Any:
        return self.fs.init_path(self._files._join(folder))


class PoolReader(FileSystemReader):
    """Reads checkpoints of a pool: of each file, what this rank needs.

    Parameters
    ----------
    path
        `whimbrel://job/step40`, if the calls of `torch.distributed.checkpoint` do not name it.
    files
        The file system, of options other than those of the environment.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, files: PoolFileSystem | None = None
    ) -> None:
        self._files = files or PoolFileSystem()
        super().__init__(self._files.path)
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        goal = None if checkpoint_id is None else self._files._strip_protocol(checkpoint_id)
        super().reset(None if goal is None else self._files._join(goal))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_ours(checkpoint_id)

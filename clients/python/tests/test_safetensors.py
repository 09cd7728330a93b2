"""A file of safetensors in a pool: who wants one tensor, or a part of it, reads the header and that part.

Left out without `WHIMBREL_TEST_PROGRAM` (`pools.py`), and where safetensors and numpy are not installed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pools import PROGRAM, Pool

np = pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.numpy")

from whimbrel.filesystem import PoolFileSystem  # noqa: E402

pytestmark = pytest.mark.skipif(not PROGRAM, reason="wants WHIMBREL_TEST_PROGRAM")

ROWS, COLUMNS = 1024, 4096


@pytest.fixture
def model(pool: Pool) -> Iterator[str]:
    files = PoolFileSystem(mount=pool.mount)
    chance = np.random.default_rng(1)
    tensors = {f"layer{n}": chance.standard_normal((ROWS, COLUMNS), dtype=np.float32) for n in range(4)}
    files.pipe_file("models/one.safetensors", safetensors.numpy.save(tensors))
    yield "models/one.safetensors"
    files.rm("models", recursive=True)


def expected(number: int) -> Any:
    chance = np.random.default_rng(1)
    return [chance.standard_normal((ROWS, COLUMNS), dtype=np.float32) for _ in range(number + 1)][number]


def test_ranges_are_read(pool: Pool, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = PoolFileSystem(mount=pool.mount)
    read = []

    def cat(path: str, start: int, end: int) -> bytes:
        read.append(end - start)
        return bytes(files.cat_file(path, start, end))

    length = int.from_bytes(cat(model, 0, 8), "little")
    header = json.loads(cat(model, 8, 8 + length))["layer2"]
    begin = 8 + length + header["data_offsets"][0]
    rows = np.frombuffer(cat(model, begin, begin + 16 * COLUMNS * 4), np.float32).reshape(16, COLUMNS)
    assert np.array_equal(rows, expected(2)[:16])
    assert sum(read) < files.size(model) // 100


class Pages:
    """The pages of a file that the kernel has: mincore(2)."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        self._view = np.frombuffer(self._map, np.uint8)
        self.count = -(-len(self._map) // mmap.PAGESIZE)

    def held(self) -> int:
        seen = np.zeros(self.count, np.uint8)
        system = ctypes.CDLL(None, use_errno=True)
        address, length = ctypes.c_void_p(self._view.ctypes.data), ctypes.c_size_t(len(self._map))
        assert system.mincore(address, length, ctypes.c_void_p(seen.ctypes.data)) == 0, ctypes.get_errno()
        return int((seen & 1).sum())


def test_what_is_opened_by_safetensors_is_read_in_part(pool: Pool, model: str) -> None:
    pytest.importorskip("safetensors", minversion="0.5", reason="earlier ones map files as no pool allows")
    # A mount that has nothing of the file.
    files = PoolFileSystem(pool=pool.manager, keys_dir=pool.keys, program=PROGRAM)
    path = Path(files.path) / model
    pages = Pages(path)
    with safetensors.safe_open(path, framework="np") as opened:
        assert sorted(opened.keys()) == [f"layer{n}" for n in range(4)]
        rows = opened.get_slice("layer2")[:16]
        assert np.array_equal(rows, expected(2)[:16])
        assert 0 < pages.held() < pages.count // 8, f"{pages.held()} of {pages.count}"
        assert np.array_equal(opened.get_tensor("layer1"), expected(1))

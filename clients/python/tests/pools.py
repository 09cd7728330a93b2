"""A pool of a manager and benefactors, mounted, for tests.

`WHIMBREL_TEST_PROGRAM` is the program that runs them. They run as root, or where users may mount by FUSE.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAM = os.environ.get("WHIMBREL_TEST_PROGRAM", "")
PATIENCE = 120


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


@contextmanager
def running(folder: Path, benefactors: int = 2) -> Iterator[Pool]:
    """Runs a pool whose data is in this folder."""
    keys, data, mount = folder / "keys", folder / "manager", folder / "mnt"
    mount.mkdir()
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path) -> str:
        command = [PROGRAM, *map(str, arguments)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        output = processes[-1].stdout
        line = output.readline().strip() if output else ""
        assert line, f"{arguments} ended"
        return line

    def lend(name: str) -> None:
        own = folder / name
        run("pool", "admit", "--data", data, name, run("pool", "key", "--data", own))
        who = ("--name", name, "--data", own, "--capacity", "4G", "--keep-free", "0")
        start("pool", "benefactor", *who, "--listen", free_address(), "--manager", manager)

    try:
        run("pool", "key", "--data", data)
        run("pool", "admit", "--data", data, "me", run("pool", "key", "--data", keys))
        manager = start("pool", "manager", "--data", data, "--listen", free_address())
        for number in range(benefactors):
            lend(f"b{number}")
        deadline = time.monotonic() + PATIENCE
        while states(manager, keys) != ["online"] * benefactors:
            assert time.monotonic() < deadline, "the benefactors did not come"
            time.sleep(0.1)
        start("mount", f"pool:{manager}", mount, "--keys-dir", keys)
        yield Pool(manager, keys, mount)
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(PATIENCE)

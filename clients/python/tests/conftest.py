"""Settings of a host that the tests use: `e2e/tests/it/clients.rs` starts it and names them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pools
import pytest

from whimbrel import Client

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "openapi.json"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what wants a host where there is none."""
    if "WHIMBREL_TEST_SETTINGS" in os.environ:
        return
    absent = pytest.mark.skip(reason="wants a host: cargo test -p whimbrel-e2e --test it -- clients::")
    for item in items:
        if "settings" in getattr(item, "fixturenames", ()):
            item.add_marker(absent)


@pytest.fixture(scope="session")
def settings() -> Any:
    """The host, and files for a guest."""
    return json.loads(Path(os.environ["WHIMBREL_TEST_SETTINGS"]).read_text(encoding="utf-8"))


@pytest.fixture
def host(settings: Any) -> Iterator[Client]:
    """Client of the host on its socket."""
    with Client(settings["socket"], timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def document() -> Any:
    """OpenAPI document of the repository."""
    return json.loads(DOCUMENT.read_text(encoding="utf-8"))


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run once, in asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pools.Pool]:
    """A pool that runs, mounted."""
    with pools.running(tmp_path_factory.mktemp("pool")) as pool:
        yield pool

"""Settings of a host that the tests use: `e2e/tests/it/clients.rs` starts it and names them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


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

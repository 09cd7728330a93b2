"""Paths of calls."""

from __future__ import annotations

from urllib.parse import quote as percent_quote

__all__ = ["quote"]


def quote(value: str | int) -> str:
    """Text of a parameter of a path. A slash in it begins no other path."""
    return percent_quote(str(value), safe="")

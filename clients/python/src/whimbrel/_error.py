"""Errors of the clients. Each code of the API has a class of its own, which `_generated.errors` has."""

from __future__ import annotations

from typing import Any

__all__ = ["ApiError", "ConnectError", "OperationCancelledError", "ProtocolError", "WhimbrelError"]


class WhimbrelError(Exception):
    """Base of all errors of this package."""


class ConnectError(WhimbrelError):
    """No daemon was reached, or it is not the one whose certificate is expected."""


class ProtocolError(WhimbrelError):
    """The connection was lost, or an answer does not match the API."""


class OperationCancelledError(WhimbrelError):
    """An operation was cancelled; `left` says what it left."""

    def __init__(self, left: str) -> None:
        super().__init__(f"the operation was cancelled: {left}")
        self.left = left


class ApiError(WhimbrelError):
    """A call or an operation that the daemon failed, with the reason."""

    def __init__(self, code: str, message: str, causes: list[str], hint: str | None) -> None:
        super().__init__(": ".join([message, *causes]))
        #: Kind of the failure, as the API calls it.
        self.code = code
        #: Message of one line.
        self.message = message
        #: Causes, outermost first.
        self.causes = causes
        #: Remedy, with the next command if there is one.
        self.hint = hint


def text_of(value: Any) -> str:
    """A text of an answer, whatever came in its place."""
    return value if isinstance(value, str) else ""

"""What answers mean, for both clients: no I/O.

Answers are bounded before they are kept, and what is not as the API says is an error of this package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

import httpx

from ._error import ApiError, ConnectError, OperationCancelledError, ProtocolError, WhimbrelError, text_of
from ._generated.errors import BY_CODE, InternalError
from ._generated.models import HostEvent, Operation, OperationId, OperationResult

#: Most bytes of an answer: a list of some ten thousand capsules.
ANSWER_MAX = 64 << 20
#: Most bytes of one line of a stream.
LINE_MAX = 16 << 20
#: Longest silence of a stream of events; a daemon sends a comment every 15 seconds.
EVENTS_SILENCE = 60.0
#: A connection for each call. A daemon closes one whose request it refused before it had read the body; the
#: next call on it would fail, and nobody could say whether it was done.
ONE_CALL = httpx.Limits(max_keepalive_connections=0)
#: Longest time until a connection stands.
CONNECT_PATIENCE = 10.0


def given(fields: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Fields that the caller gave."""
    if fields is None:
        return None
    return {name: value for name, value in fields.items() if value is not None}


def query(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """Parameters of a query that the caller gave."""
    written = {True: "true", False: "false"}
    pairs = (given(fields) or {}).items()
    return {name: written[value] if isinstance(value, bool) else value for name, value in pairs}


def timeouts(read: float | None) -> httpx.Timeout:
    """Time for a connection, and for the silence before the next bytes."""
    return httpx.Timeout(read, connect=CONNECT_PATIENCE)


def failure(error: httpx.HTTPError, place: str) -> WhimbrelError:
    """An error of the connection."""
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return ConnectError(f"cannot connect to {place}: {error}")
    return ProtocolError(f"lost contact with {place}: {error or type(error).__name__}")


class Body:
    """Bytes of an answer, which are bounded."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, piece: bytes) -> None:
        """Adds the next bytes."""
        if len(self._bytes) + len(piece) > ANSWER_MAX:
            raise ProtocolError(f"an answer is longer than {ANSWER_MAX} bytes")
        self._bytes += piece

    def json(self) -> Any:
        """The answer, if it is JSON; none if it is empty."""
        if not self._bytes:
            return None
        try:
            return json.loads(self._bytes)
        except ValueError as error:
            raise ProtocolError(f"an answer is no JSON: {error}") from error

    def text(self) -> str:
        """The answer as a text, whatever bytes a guest printed."""
        return self._bytes.decode(errors="replace")

    def refusal(self, status: int) -> ApiError:
        """The error that this answer is."""
        try:
            return api_error(self.json())
        except ProtocolError:
            return InternalError("internal", f"the daemon answered {status} without a reason", [], None)


def api_error(answer: Any) -> ApiError:
    """The error of a failed call or operation, of the class of its code."""
    fields = answer if isinstance(answer, dict) else {}
    code, message = text_of(fields.get("code")), text_of(fields.get("message"))
    causes = [text_of(cause) for cause in fields.get("causes") or []]
    # A code of a newer daemon is read as an internal error, as the API says.
    kind = BY_CODE.get(code, InternalError)
    return kind(code, message or "the daemon gave no reason", causes, fields.get("hint"))


class Lines:
    """Splits bytes that come in pieces of any size into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, piece: bytes) -> Iterator[bytes]:
        """Lines that are whole with the next bytes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LINE_MAX:
            raise ProtocolError(f"a line of an answer is longer than {LINE_MAX} bytes")
        yield from lines


def operation_of(line: bytes) -> Operation:
    """State of an operation in a line."""
    return cast(Operation, _object(line))


def event_of(line: bytes) -> HostEvent | None:
    """Event of a line in the format of server-sent events (HTML standard, 9.2); none in other lines."""
    return cast(HostEvent, _object(line.removeprefix(b"data: "))) if line.startswith(b"data: ") else None


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"a line of an answer is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolError("a line of an answer is no object")
    return value


def id_of(operation: Operation | OperationId) -> OperationId:
    """Number of an operation."""
    return operation if isinstance(operation, int) else operation["id"]


def result_of(operation: Operation | None, number: OperationId) -> OperationResult:
    """Result of an operation that has ended; an error if it has none."""
    if operation is None or operation["state"] == "running":
        raise ProtocolError(f"lost contact with the daemon while operation {number} was running")
    if operation["state"] == "failed":
        raise api_error(operation["error"])
    if operation["state"] == "cancelled":
        raise OperationCancelledError(operation["left"])
    return operation["result"]

"""Asynchronous client.

The blocking one (`_sync.py`) has the same methods; only what waits is written differently.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import httpx

from . import _answers
from ._address import Address
from ._generated.calls import AsyncCalls
from ._generated.models import HostEvent, Operation, OperationId, OperationResult
from ._path import quote

__all__ = ["AsyncClient"]


class AsyncClient(AsyncCalls):
    """Client of the daemon of one host, for asyncio and trio.

    `place` is the path of a socket, or `https://HOST[:PORT]` with a token. Without it the variables of the
    command line count: `WHIMBREL_HOST`, `WHIMBREL_TOKEN_FILE`, `WHIMBREL_FINGERPRINT` and `WHIMBREL_SOCKET`.
    A `timeout` is the longest silence within an answer, in seconds; without one, answers may take any time:
    the one to `stop` comes when the guest has shut down. Nothing is opened before the first call.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | None = None,
        *,
        token: str | None = None,
        fingerprint: str | None = None,
        timeout: float | None = None,
    ) -> None:
        address = Address.of(place, token, fingerprint)
        self._place = address.socket or address.url
        self._timeout = timeout
        if address.socket:
            transport = httpx.AsyncHTTPTransport(uds=address.socket, limits=_answers.ONE_CALL)
        else:
            transport = httpx.AsyncHTTPTransport(verify=address.ssl_context(), limits=_answers.ONE_CALL)
        headers = {"authorization": f"Bearer {address.token}"} if address.token else {}
        # Settings of the environment, such as a proxy, would show the token to somebody else.
        self._http = httpx.AsyncClient(
            base_url=address.url, transport=transport, headers=headers, trust_env=False
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def watch(self, operation: Operation | OperationId) -> AsyncIterator[Operation]:
        """States of an operation, until it has ended; the last one has its result."""
        path = f"/v1/operations/{quote(_answers.id_of(operation))}/events"
        lines = _answers.Lines()
        async with self._stream("GET", path) as answer:
            async for piece in answer.aiter_bytes():
                for line in lines.add(piece):
                    yield _answers.operation_of(line)

    async def wait(
        self,
        operation: Operation | OperationId,
        *,
        progress: Callable[[Operation], None] | None = None,
    ) -> OperationResult:
        """Waits for the end of an operation and returns its result.

        Each state on the way goes to `progress`. A failure is raised as the error of its code. Whoever stops
        waiting does not cancel the operation: it goes on until `cancel`.
        """
        last: Operation | None = None
        async for state in self.watch(operation):
            last = state
            if progress is not None:
                progress(state)
        return _answers.result_of(last, _answers.id_of(operation))

    async def events(self, *, since: int | None = None, follow: bool = True) -> AsyncIterator[HostEvent]:
        """What happens on the host: the events that it still knows, then those to come.

        `since` is the number of the last event that the caller knows. The iterator ends with `follow` false,
        and with an error when the daemon ends; go on with `since` then.
        """
        query = {"since": since, "follow": follow}
        lines = _answers.Lines()
        stream = self._stream("GET", "/v1/events", query=query, read=_answers.EVENTS_SILENCE)
        async with stream as answer:
            async for piece in answer.aiter_bytes():
                for line in lines.add(piece):
                    event = _answers.event_of(line)
                    if event is not None:
                        yield event

    async def follow_console(self, name: str) -> AsyncIterator[bytes]:
        """Recent output of a machine on its serial port, and what it prints from now on."""
        path = f"/v1/machines/{quote(name)}/console/log"
        async with self._stream("GET", path, query={"follow": True}) as answer:
            async for piece in answer.aiter_bytes():
                yield piece

    @asynccontextmanager
    async def _stream(
        self,
        method: str,
        path: str,
        *,
        query: Any = None,
        body: Any = None,
        read: float | None = None,
    ) -> AsyncIterator[httpx.Response]:
        request = self._http.build_request(
            method,
            path,
            params=_answers.query(query),
            json=_answers.given(body),
            timeout=_answers.timeouts(read),
        )
        try:
            answer = await self._http.send(request, stream=True)
            try:
                if answer.status_code >= 400:
                    raise (await self._read(answer)).refusal(answer.status_code)
                yield answer
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            raise _answers.failure(error, self._place) from error

    @staticmethod
    async def _read(answer: httpx.Response) -> _answers.Body:
        body = _answers.Body()
        async for piece in answer.aiter_bytes():
            body.add(piece)
        return body

    async def _json(self, method: str, path: str, *, query: Any = None, body: Any = None) -> Any:
        stream = self._stream(method, path, query=query, body=body, read=self._timeout)
        async with stream as answer:
            return (await self._read(answer)).json()

    async def _text(self, method: str, path: str, *, query: Any = None) -> str:
        async with self._stream(method, path, query=query, read=self._timeout) as answer:
            return (await self._read(answer)).text()

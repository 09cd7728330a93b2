"""Client of the HTTP API of Whimbrel hosts.

    from whimbrel import Client

    with Client() as host:
        operation = host.checkpoint("web", tag="before-upgrade")
        print(host.wait(operation))

`Client` waits for its answers, `AsyncClient` is awaited; both have a method for each call of the API. Answers
are typed dictionaries (`whimbrel.models`), errors are classes (`whimbrel.errors`).
"""

from __future__ import annotations

from . import errors, models
from ._async import AsyncClient
from ._error import ApiError, ConnectError, OperationCancelledError, ProtocolError, WhimbrelError
from ._sync import Client

__all__ = [
    "ApiError",
    "AsyncClient",
    "Client",
    "ConnectError",
    "OperationCancelledError",
    "ProtocolError",
    "WhimbrelError",
    "errors",
    "models",
]

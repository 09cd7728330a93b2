"""Errors of the clients: a class for each code of the API, and those of the connection."""

from __future__ import annotations

from ._error import ApiError, ConnectError, OperationCancelledError, ProtocolError, WhimbrelError
from ._generated import errors as _generated
from ._generated.errors import *  # noqa: F403

__all__ = ["ApiError", "ConnectError", "OperationCancelledError", "ProtocolError", "WhimbrelError"]
__all__ += _generated.__all__

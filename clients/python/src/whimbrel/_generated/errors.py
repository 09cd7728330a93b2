"""Errors of the API, a class for each code. Written by generate.py from docs/openapi.json; change those."""

from __future__ import annotations

from .._error import ApiError


class NotFoundError(ApiError):
    """No machine, capsule, host or operation of that name."""


class NameTakenError(ApiError):
    """The name is in use already."""


class InvalidError(ApiError):
    """The request is wrong in every state of the host."""


class BusyError(ApiError):
    """Another operation uses the machine or capsule, or its state forbids this one."""


class UnreachableError(ApiError):
    """Another host does not answer."""


class UntrustedError(ApiError):
    """Another host is not trusted here, or does not trust this one."""


class UnauthenticatedError(ApiError):
    """The request has no token that is valid here."""


class ForbiddenError(ApiError):
    """This user or token may not make the request."""


class RateLimitedError(ApiError):
    """Too many failed logins or connections from one address."""


class DamagedError(ApiError):
    """Stored data does not match its digest."""


class NoSpaceError(ApiError):
    """Disk or memory is full."""


class QemuFailedError(ApiError):
    """QEMU refused a command or ended."""


class UnsupportedError(ApiError):
    """This host, kernel or QEMU does not have the function."""


class CancelledError(ApiError):
    """The operation was cancelled."""


class InternalError(ApiError):
    """The daemon has a fault."""


#: Class of each code.
BY_CODE: dict[str, type[ApiError]] = {
    "not_found": NotFoundError,
    "name_taken": NameTakenError,
    "invalid": InvalidError,
    "busy": BusyError,
    "unreachable": UnreachableError,
    "untrusted": UntrustedError,
    "unauthenticated": UnauthenticatedError,
    "forbidden": ForbiddenError,
    "rate_limited": RateLimitedError,
    "damaged": DamagedError,
    "no_space": NoSpaceError,
    "qemu_failed": QemuFailedError,
    "unsupported": UnsupportedError,
    "cancelled": CancelledError,
    "internal": InternalError,
}

__all__ = [
    "BY_CODE",
    "BusyError",
    "CancelledError",
    "DamagedError",
    "ForbiddenError",
    "InternalError",
    "InvalidError",
    "NameTakenError",
    "NoSpaceError",
    "NotFoundError",
    "QemuFailedError",
    "RateLimitedError",
    "UnauthenticatedError",
    "UnreachableError",
    "UnsupportedError",
    "UntrustedError",
]

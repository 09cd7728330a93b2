"""The way to a daemon, which all modules and the inventory share, and what its errors become."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

try:
    from whimbrel import ApiError, Client, WhimbrelError
except ImportError:
    INSTALLED = False
else:
    INSTALLED = True

#: Options of the connection. The environment is read later, so that it does not contradict a task that names
#: another way to the daemon.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "socket": {"type": "path"},
    "url": {"type": "str"},
    "token": {"type": "str", "no_log": True},
    "token_file": {"type": "path", "no_log": False},
    "fingerprint": {"type": "str"},
}

T = TypeVar("T")


class RefusalError(Exception):
    """What was asked for is not done; `details` is what a task says about it beside the message."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


def module_of(arguments: Mapping[str, Any], **rules: Any) -> AnsibleModule:
    """A module with these arguments and those of the connection."""
    return AnsibleModule(argument_spec={**ARGUMENTS, **arguments}, supports_check_mode=True, **rules)


def run(module: AnsibleModule, work: Callable[[Client], dict[str, Any]]) -> None:
    """Ends the module with the result of `work`, or with the reason why there is none."""
    try:
        result = ask(module.params, work)
    except RefusalError as error:
        module.fail_json(msg=str(error), **error.details)
    module.exit_json(**result)


def ask(options: Mapping[str, Any], work: Callable[[Client], T]) -> T:
    """What `work` gets from the daemon that the options name. Each failure is a refusal."""
    if not INSTALLED:
        raise RefusalError(missing_required_lib("whimbrel"))
    try:
        with _client(options) as host:
            return work(host)
    except ApiError as error:
        hint = f"; {error.hint}" if error.hint else ""
        raise RefusalError(f"{error} ({error.code}){hint}", code=error.code, hint=error.hint) from error
    except WhimbrelError as error:
        raise RefusalError(str(error)) from error


def _client(options: Mapping[str, Any]) -> Client:
    """A client of the daemon that the options name, or else the environment."""
    for one, other in [("socket", "url"), ("token", "token_file")]:
        if options.get(one) and options.get(other):
            raise RefusalError(f"{one} and {other} contradict each other")
    socket, variables = options.get("socket"), os.environ
    url = None if socket else options.get("url") or variables.get("WHIMBREL_HOST")
    if not url:
        return Client(socket or variables.get("WHIMBREL_SOCKET"))
    fingerprint = options.get("fingerprint") or variables.get("WHIMBREL_FINGERPRINT")
    return Client(url, token=_token(options), fingerprint=fingerprint)


def _token(options: Mapping[str, Any]) -> str | None:
    if token := options.get("token"):
        return str(token)
    file = options.get("token_file") or os.environ.get("WHIMBREL_TOKEN_FILE")
    if not file:
        return None
    try:
        return Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RefusalError(f"cannot read the token: {error}") from error

"""Options of the connection, which all modules and the inventory have."""

from __future__ import annotations


class ModuleDocFragment:
    """Documentation of what `module_utils/connection.py` reads."""

    DOCUMENTATION = r"""
options:
  socket:
    description:
      - Path of the daemon's socket, on the computer that the task runs on.
      - Without O(socket) and O(url), E(WHIMBREL_HOST) and E(WHIMBREL_SOCKET) count; without them it is the
        daemon's own default, V(/run/whimbrel/host.sock).
    type: path
  url:
    description: Address of the daemon's API elsewhere, as V(https://HOST) or V(https://HOST:PORT).
    type: str
  token:
    description:
      - Token for O(url); C(whimbrel token create) makes one.
      - Its role must be admin to change networks, and to make machines of disks or a kernel. For the rest
        operator will do, and to look, viewer.
    type: str
  token_file:
    description:
      - File with the token, on the computer that the task runs on.
      - Without it and O(token), E(WHIMBREL_TOKEN_FILE) counts.
    type: path
  fingerprint:
    description:
      - Fingerprint of the daemon's certificate, as its log says it. With any other, no token is sent.
      - Without it, E(WHIMBREL_FINGERPRINT) counts; without both, the certificate must be of an authority that
        the computer trusts.
    type: str
requirements:
  - Python 3.10 or later
  - The Python package C(whimbrel), where the task runs
"""

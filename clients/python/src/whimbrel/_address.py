"""Where a daemon is, and how its certificate is checked.

A daemon that made its certificate itself is known by its fingerprint, as the command line knows it: any other
certificate ends the connection before a byte, and so before the token, is sent.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ._error import WhimbrelError

__all__ = ["DEFAULT_SOCKET", "Address"]

#: Socket of a daemon that was started without `--socket`.
DEFAULT_SOCKET = "/run/whimbrel/host.sock"
#: Port of the API where an address names none.
DEFAULT_PORT = 7443


@dataclass(frozen=True)
class Address:
    """A unix socket, or an API over TLS with what it takes to be let in."""

    #: Path of the socket; empty for an API over TLS.
    socket: str
    #: Begin of the URLs of all calls.
    url: str
    #: Text of the token; not shown.
    token: str | None = field(default=None, repr=False)
    #: SHA-256 of the certificate; none asks the authorities that this computer trusts.
    fingerprint: bytes | None = None

    @classmethod
    def of(cls, place: str | os.PathLike[str] | None, token: str | None, fingerprint: str | None) -> Address:
        """The address that the arguments name; without any, the one of the environment."""
        if place is None:
            environment = os.environ
            place = environment.get("WHIMBREL_HOST") or environment.get("WHIMBREL_SOCKET") or DEFAULT_SOCKET
            if token is None and (file := environment.get("WHIMBREL_TOKEN_FILE")):
                token = Path(file).read_text(encoding="utf-8").strip()
            fingerprint = fingerprint or environment.get("WHIMBREL_FINGERPRINT")
        text = os.fspath(place)
        if not text.startswith("https://"):
            if text.startswith("http://"):
                raise WhimbrelError("a token is not sent without TLS: the address is https://HOST[:PORT]")
            return cls(text, "http://whimbrel")
        parts = urlsplit(text)
        if not parts.hostname or parts.path not in ("", "/") or parts.query or parts.username:
            raise WhimbrelError("an address is https://HOST or https://HOST:PORT")
        if token is None:
            raise WhimbrelError(f"{text} wants a token; `whimbrel token create` makes one")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        url = f"https://{host}:{parts.port or DEFAULT_PORT}"
        return cls("", url, token, _digest(fingerprint) if fingerprint else None)

    def ssl_context(self) -> ssl.SSLContext:
        """How the certificate of the daemon is checked."""
        context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self.fingerprint is not None:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.sslsocket_class = _pinned(ssl.SSLSocket, self.fingerprint)
            context.sslobject_class = _pinned(ssl.SSLObject, self.fingerprint)
        return context


def _digest(fingerprint: str) -> bytes:
    text = fingerprint.removeprefix("sha256:").replace(":", "")
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise WhimbrelError("a fingerprint is sha256: and 64 hexadecimal digits")
    return digest


def _pinned(base: Any, fingerprint: bytes) -> Any:
    """A connection that ends its handshake only with the certificate of this fingerprint.

    Python's TLS has no hook for it but a class of one's own (`SSLContext.sslsocket_class`).
    """

    class Pinned(base):  # type: ignore[misc]
        def do_handshake(self, *arguments: Any) -> None:
            super().do_handshake(*arguments)
            shown = self.getpeercert(binary_form=True)
            digest = hashlib.sha256(shown or b"").hexdigest()
            if digest != fingerprint.hex():
                raise ssl.SSLCertVerificationError(
                    f"the daemon shows another certificate, with the fingerprint sha256:{digest}"
                )

    return Pinned

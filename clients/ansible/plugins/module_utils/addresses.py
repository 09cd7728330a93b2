"""Addresses of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any


def addresses_of(info: Mapping[str, Any]) -> list[str]:
    """Addresses at which a machine may be reached, those of its first network port first.

    Some are what the guest says, so what is no address, or none of a network, is left out.
    """
    found = []
    for nic in info.get("nics", []):
        for text in nic.get("addresses", []):
            try:
                address = ip_address(text)
            except ValueError:
                continue
            if not (address.is_loopback or address.is_link_local or address.is_unspecified):
                found.append(str(address))
    return found

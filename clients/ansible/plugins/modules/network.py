#!/usr/bin/python
"""Networks of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: network
short_description: Networks of a Whimbrel host
version_added: 0.1.0
description:
  - Makes and deletes networks, each a bridge with addresses, names and a way out.
  - A network cannot change. If the task says something else than it has, it fails and changes nothing.
options:
  name:
    description: Name of the network and of its bridge.
    type: str
    required: true
  state:
    description: Whether there is to be such a network. One that a machine uses is not deleted.
    type: str
    choices: [present, absent]
    default: present
  subnet:
    description:
      - IPv4 addresses, like V(10.1.2.0/24).
      - A new network has a /24 that follows from its name without it.
    type: str
  subnet6:
    description:
      - IPv6 addresses, a /64 like V(fd00:1:2:3::/64), or V(none).
      - A new network has a /64 that follows from its name without it.
    type: str
  isolated:
    description:
      - Whether machines reach nothing but each other and the host.
      - A new network is not isolated without it.
    type: bool
extends_documentation_fragment: whimbrel.whimbrel.connection
attributes:
  check_mode:
    support: full
    description: Says what would be done, and does nothing.
  diff_mode:
    support: full
    description: Shows the network before and after.
author: The Whimbrel authors
"""

EXAMPLES = r"""
- name: A network of machines
  whimbrel.whimbrel.network:
    name: lan0

- name: One from which nobody gets out
  whimbrel.whimbrel.network:
    name: lab0
    subnet: 10.9.0.0/24
    subnet6: none
    isolated: true
"""

RETURN = r"""
network:
  description: The network, as the API describes it; none if it is absent.
  returned: success
  type: dict
"""

from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

from ..module_utils.connection import RefusalError, module_of, run

if TYPE_CHECKING:
    from whimbrel import Client

ARGUMENTS: dict[str, dict[str, Any]] = {
    "name": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "subnet": {"type": "str"},
    "subnet6": {"type": "str"},
    "isolated": {"type": "bool"},
}


def find(host: Client, name: str) -> dict[str, Any] | None:
    """The network of this name."""
    return next((dict(network) for network in host.networks() if network["name"] == name), None)


def subnet_of(text: str | None) -> str:
    """A subnet as it is written usually."""
    if text is None or text == "none":
        return "none"
    try:
        return str(ip_network(text))
    except ValueError as error:
        raise RefusalError(f"{text} is no subnet: {error}") from error


def check_fixed(network: dict[str, Any], options: dict[str, Any]) -> None:
    """Refuses what the network cannot become."""
    for option in ("subnet", "subnet6", "isolated"):
        if options[option] is None:
            continue
        now, wanted = network.get(option), options[option]
        if option != "isolated":
            now, wanted = subnet_of(now), subnet_of(wanted)
        if now != wanted:
            raise RefusalError(
                f"{option} of {network['name']} cannot change: it is {now} and not {wanted}, "
                "which only a new network can have"
            )


def apply(host: Client, options: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """Makes or deletes the network, unless it is as the task says."""
    name, present = str(options["name"]), options["state"] == "present"
    before = find(host, name)
    if before is not None and present:
        check_fixed(before, options)
    changed = present == (before is None)
    after = before
    if changed and present:
        wanted = {key: options[key] for key in ("subnet", "subnet6", "isolated")}
        after = {"name": name} if check_mode else dict(host.create_network(name=name, **wanted))
    elif changed:
        after = None
        if not check_mode:
            host.delete_network(name)
    return {"changed": changed, "network": after, "diff": {"before": view(before), "after": view(after)}}


def view(network: dict[str, Any] | None) -> dict[str, Any]:
    """What a difference shows of a network."""
    fields = ("name", "subnet", "subnet6", "isolated")
    return {} if network is None else {key: network[key] for key in fields if key in network}


def main() -> None:
    """Runs the module."""
    module = module_of(ARGUMENTS)
    run(module, lambda host: apply(host, module.params, module.check_mode))


if __name__ == "__main__":
    main()

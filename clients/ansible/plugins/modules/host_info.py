#!/usr/bin/python
"""What is known about a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_info
short_description: What is known about a Whimbrel host
version_added: 0.1.0
description: Describes the host, its networks and the use of its store, and changes nothing.
extends_documentation_fragment: whimbrel.whimbrel.connection
attributes:
  check_mode:
    support: full
    description: Nothing is changed.
author: The Whimbrel authors
"""

EXAMPLES = r"""
- name: The host
  whimbrel.whimbrel.host_info:
  register: found

- name: It has space
  ansible.builtin.assert:
    that: found.host.store.free > 100 * 1024 * 1024 * 1024
"""

RETURN = r"""
host:
  description: The host, as the API describes it.
  returned: success
  type: dict
networks:
  description: Its networks, as the API describes them.
  returned: success
  type: list
  elements: dict
"""

from typing import Any

from ..module_utils.connection import module_of, run

ARGUMENTS: dict[str, dict[str, Any]] = {}


def main() -> None:
    """Runs the module."""
    run(module_of(ARGUMENTS), lambda host: {"host": host.host(), "networks": host.networks()})


if __name__ == "__main__":
    main()

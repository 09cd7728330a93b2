#!/usr/bin/python
"""What is known about machines of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: machine_info
short_description: What is known about machines of a Whimbrel host
version_added: 0.1.0
description: Lists machines, and changes nothing.
options:
  name:
    description: Only the machine of this name; the list is empty if there is none.
    type: str
extends_documentation_fragment: whimbrel.whimbrel.connection
attributes:
  check_mode:
    support: full
    description: Nothing is changed.
author: The Whimbrel authors
"""

EXAMPLES = r"""
- name: The machine web
  whimbrel.whimbrel.machine_info:
    name: web
  register: found

- name: Its state
  ansible.builtin.debug:
    msg: "{{ found.machines[0].state.kind }}"
"""

RETURN = r"""
machines:
  description: Machines, as the API describes them.
  returned: success
  type: list
  elements: dict
"""

from typing import Any

from ..module_utils.connection import module_of, run

ARGUMENTS: dict[str, dict[str, Any]] = {"name": {"type": "str"}}


def main() -> None:
    """Runs the module."""
    module = module_of(ARGUMENTS)
    name = module.params["name"]
    run(module, lambda host: {"machines": [it for it in host.machines() if name in (None, it["name"])]})


if __name__ == "__main__":
    main()

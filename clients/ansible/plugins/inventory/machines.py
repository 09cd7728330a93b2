"""Inventory of the machines of hosts."""

from __future__ import annotations

DOCUMENTATION = r"""
name: machines
short_description: Machines of a Whimbrel host
version_added: 0.1.0
description:
  - Lists the machines that run, with their addresses.
  - The file of the inventory is named C(whimbrel.yml), or ends with C(.whimbrel.yml).
  - Each machine has the variables C(ansible_host) (its first address), C(whimbrel_state), C(whimbrel_labels),
    C(whimbrel_addresses), C(whimbrel_note), C(whimbrel_memory) and C(whimbrel_cpus).
  - Without O(keyed_groups) there is a group for each label, C(label_KEY_VALUE), and for each state,
    C(state_running).
options:
  plugin:
    description: Name of this plugin.
    type: str
    required: true
    choices: [whimbrel.whimbrel.machines]
  states:
    description: States of the machines to list; an empty list stands for all.
    type: list
    elements: str
    default: [running]
extends_documentation_fragment:
  - whimbrel.whimbrel.connection
  - ansible.builtin.constructed
author: The Whimbrel authors
"""

EXAMPLES = r"""
# whimbrel.yml: the daemon of this computer
plugin: whimbrel.whimbrel.machines

---
# cloud.whimbrel.yml: a daemon elsewhere, and only one kind of groups
plugin: whimbrel.whimbrel.machines
url: https://10.0.0.1
token_file: /root/.config/whimbrel/viewer.token
fingerprint: sha256:025cde6255ca199533cb1a44d2165061f6f0cfacd8adf0870d12d12593d2239a
keyed_groups:
  - key: whimbrel_labels.tier
    prefix: tier
"""

from typing import Any

from ansible.errors import AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin, Constructable
from ansible.utils.unsafe_proxy import wrap_var

from ..module_utils.addresses import addresses_of
from ..module_utils.connection import ARGUMENTS, RefusalError, ask
from ..module_utils.wanted import settings_now, state_of


class InventoryModule(BaseInventoryPlugin, Constructable):  # type: ignore[misc]
    """Reads the machines of one host."""

    NAME = "whimbrel.whimbrel.machines"

    def verify_file(self, path: str) -> bool:
        """Whether a file may be meant for this plugin."""
        return super().verify_file(path) and path.endswith(("whimbrel.yml", "whimbrel.yaml"))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        """Adds the machines to the inventory."""
        super().parse(inventory, loader, path, cache)
        self._read_config_data(path)
        for info in self._machines():
            self._add(info)

    def _machines(self) -> list[dict[str, Any]]:
        options = {name: self.get_option(name) for name in ARGUMENTS}
        try:
            return ask(options, lambda host: [dict(info) for info in host.machines()])
        except RefusalError as error:
            raise AnsibleParserError(str(error)) from error

    def _add(self, info: dict[str, Any]) -> None:
        state, states = state_of(info), self.get_option("states")
        if states and state not in states:
            return
        addresses, settings, name = addresses_of(info), settings_now(info), info["name"]
        variables = {
            "whimbrel_state": state,
            "whimbrel_addresses": addresses,
            # These are texts of others: no templates.
            "whimbrel_labels": wrap_var(settings["labels"]),
            "whimbrel_note": wrap_var(settings["note"]),
            "whimbrel_memory": info["memory"],
            "whimbrel_cpus": info["cpus"],
        }
        if addresses:
            variables["ansible_host"] = addresses[0]
        self.inventory.add_host(name)
        for key, value in variables.items():
            self.inventory.set_variable(name, key, value)
        strict = self.get_option("strict")
        self._set_composite_vars(self.get_option("compose"), variables, name, strict=strict)
        self._add_host_to_composed_groups(self.get_option("groups"), variables, name, strict=strict)
        if keyed := self.get_option("keyed_groups"):
            self._add_host_to_keyed_groups(keyed, variables, name, strict=strict)
            return
        for group in [
            f"state_{state}",
            *(f"label_{key}_{value}" for key, value in settings["labels"].items()),
        ]:
            self.inventory.add_host(name, group=self.inventory.add_group(self._sanitize_group_name(group)))

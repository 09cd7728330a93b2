#!/usr/bin/python
"""Machines of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: machine
short_description: Virtual machines of a Whimbrel host
version_added: 0.1.0
description:
  - Makes a machine of an image, of disks or of a kernel, and changes, starts, stops, suspends and deletes it.
  - O(publish), O(labels), O(note), O(autostart) and O(restart) of a machine that exists become what the task
    says.
  - O(memory), O(cpus) and O(networks) belong to a machine for good. If the task says something else than the
    machine has, it fails and changes nothing.
  - All other options count when a machine is made, and are not looked at later.
  - What a task leaves out stays as it is.
options:
  name:
    description: Name of the machine.
    type: str
    required: true
  state:
    description:
      - V(running) makes the machine, or starts, resumes or unpauses it. One that has crashed is started.
      - V(stopped) lets the guest shut down. A machine that has crashed stays as it is.
      - V(suspended) saves memory and disks as a capsule and ends the machine; V(running) continues it.
      - V(absent) cuts the power of a machine that runs, and deletes it with the changes on its disks.
        Its capsules stay.
    type: str
    choices: [running, stopped, suspended, absent]
    default: running
  image:
    description:
      - Image to make the machine of, like V(debian/12). It is fetched if the host does not have it.
      - Without O(networks), the machine has the network ports of the image.
    type: str
  disk_size:
    description: Size of the first disk of O(image), if larger than that of the image.
    type: str
  disks:
    description:
      - Raw files of the host that disks start from, each V(FILE) or V(FILE,size=SIZE).
      - The files are not written.
    type: list
    elements: str
  kernel:
    description: Kernel to load, a file of the host.
    type: path
  initrd:
    description: Initial RAM disk of the kernel, a file of the host.
    type: path
  append:
    description: Command line of the kernel.
    type: str
  memory:
    description:
      - Size of the memory.
      - A new machine has V(1G) without it.
    type: str
  cpus:
    description:
      - Number of virtual CPUs.
      - A new machine has V(1) without it.
    type: int
  cpu:
    description: CPU model, like V(x86-64-v3).
    type: str
  profile:
    description: Hardware of the machine.
    type: str
    choices: [default, uefi, desktop, micro]
  tpm:
    description: Whether it has a TPM 2.0.
    type: bool
    default: false
  display:
    description: Whether it has a screen, a keyboard and a pointer.
    type: bool
    default: false
  networks:
    description:
      - Networks or bridges of the host, one for each network port, each V(NAME) or V(NAME,mac=ADDRESS).
      - V(none) leaves a port unplugged.
    type: list
    elements: str
  publish:
    description:
      - Ports of the host that lead to the machine, each V([ADDRESS:]PORT:PORT[/udp]).
      - Others are published no longer.
      - Write them in quotes, because YAML takes some of them for numbers.
    type: list
    elements: str
  ssh_keys:
    description: Public SSH keys that may log in, by cloud-init.
    type: list
    elements: str
  user_data:
    description: User data for cloud-init.
    type: str
  network_config:
    description: Network configuration for cloud-init.
    type: str
  labels:
    description: Labels of the machine; others are removed.
    type: dict
  note:
    description: Remark about the machine.
    type: str
  autostart:
    description: Whether the machine starts with its host.
    type: bool
  autostart_order:
    description: Place among the machines that start with the host; the lowest number starts first.
    type: int
    default: 0
  autostart_delay:
    description: Seconds until the next machine is started.
    type: int
    default: 0
  restart:
    description: Ends after which the machine is started again.
    type: str
    choices: ['no', on-failure, always]
  restart_limit:
    description: Most restarts in a row.
    type: int
    default: 10
  stop_timeout:
    description: Seconds that the guest has to shut down. After that the task fails, and the machine runs on.
    type: int
    default: 60
  force:
    description: Cut the power if the guest does not shut down in time.
    type: bool
    default: false
  wait_address:
    description:
      - Seconds to wait until an address of a running machine is known; none are waited for without it.
      - In a network of Whimbrel it is known at once. On another bridge qemu-ga in the guest says it.
    type: int
    default: 0
extends_documentation_fragment: whimbrel.whimbrel.connection
attributes:
  check_mode:
    support: full
    description: Says what would be done, and does nothing.
  diff_mode:
    support: full
    description: Shows state, published ports and settings before and after.
author: The Whimbrel authors
"""

EXAMPLES = r"""
- name: A web server
  whimbrel.whimbrel.machine:
    name: web
    image: debian/12
    memory: 2G
    networks: [lan0]
    publish: ["8080:80"]
    ssh_keys: ["{{ lookup('file', '~/.ssh/id_ed25519.pub') }}"]
    labels: {tier: front}
    autostart: true
    restart: on-failure

- name: The same host from elsewhere, by its API
  whimbrel.whimbrel.machine:
    url: https://10.0.0.1
    token_file: ~/.config/whimbrel/admin.token
    fingerprint: sha256:025cde6255ca199533cb1a44d2165061f6f0cfacd8adf0870d12d12593d2239a
    name: web
    state: suspended

- name: No such machine
  whimbrel.whimbrel.machine:
    name: old
    state: absent
"""

RETURN = r"""
steps:
  description: What was done, or would be done in check mode.
  returned: success
  type: list
  elements: str
  sample: [settings, start]
machine:
  description: The machine, as the API describes it; none if it is absent.
  returned: success
  type: dict
address:
  description: First address of the machine, if one is known.
  returned: success
  type: str
  sample: 10.89.22.96
code:
  description: Kind of the failure, as the API calls it.
  returned: when the daemon refuses
  type: str
  sample: busy
hint:
  description: Remedy that the daemon names, if it names one.
  returned: when the daemon refuses
  type: str
"""

import time
from typing import TYPE_CHECKING, Any

from ..module_utils import wanted
from ..module_utils.addresses import addresses_of
from ..module_utils.connection import RefusalError, module_of, run

if TYPE_CHECKING:
    from whimbrel import Client

ARGUMENTS: dict[str, dict[str, Any]] = {
    "name": {"type": "str", "required": True},
    "state": {
        "type": "str",
        "choices": ["running", "stopped", "suspended", "absent"],
        "default": "running",
    },
    "image": {"type": "str"},
    "disk_size": {"type": "str"},
    "disks": {"type": "list", "elements": "str"},
    "kernel": {"type": "path"},
    "initrd": {"type": "path"},
    "append": {"type": "str"},
    "memory": {"type": "str"},
    "cpus": {"type": "int"},
    "cpu": {"type": "str"},
    "profile": {"type": "str", "choices": ["default", "uefi", "desktop", "micro"]},
    "tpm": {"type": "bool", "default": False},
    "display": {"type": "bool", "default": False},
    "networks": {"type": "list", "elements": "str"},
    "publish": {"type": "list", "elements": "str"},
    "ssh_keys": {"type": "list", "elements": "str"},
    "user_data": {"type": "str", "no_log": True},
    "network_config": {"type": "str"},
    "labels": {"type": "dict"},
    "note": {"type": "str"},
    "autostart": {"type": "bool"},
    "autostart_order": {"type": "int", "default": 0},
    "autostart_delay": {"type": "int", "default": 0},
    "restart": {"type": "str", "choices": ["no", "on-failure", "always"]},
    "restart_limit": {"type": "int", "default": wanted.RESTART_LIMIT},
    "stop_timeout": {"type": "int", "default": 60},
    "force": {"type": "bool", "default": False},
    "wait_address": {"type": "int", "default": 0},
}
RULES: dict[str, Any] = {
    "mutually_exclusive": [("image", "disks"), ("image", "kernel")],
    "required_by": {"disk_size": "image", "initrd": "kernel", "append": "kernel"},
}


class Plan:
    """What a task does with a machine: read and compared first, done later."""

    def __init__(self, host: Client, options: dict[str, Any]) -> None:
        self.host, self.options, self.name = host, options, str(options["name"])
        self.info = self._find()
        state, aim = wanted.state_of(self.info), str(options["state"])
        self.before: dict[str, Any] = {"state": state}
        self.after: dict[str, Any] = {"state": aim}
        # Bodies of requests; an empty one is not needed.
        self.ports: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.request: dict[str, Any] = {}
        way = wanted.way(self.name, state, aim)
        if self.info is None and way:
            self.request = wanted.creation_of(options)
            self.after |= {"memory": self.request["memory"], "cpus": self.request["cpus"]}
        if self.info is not None and aim != "absent":
            wanted.check_fixed(self.info, options)
            self._compare(self.info)
        changes = [("ports", self.ports), ("settings", self.settings)]
        self.steps = [step for step, body in changes if body] + way
        if not way:
            # A machine that has crashed is stopped, too.
            self.after["state"] = state

    def _find(self) -> dict[str, Any] | None:
        """The machine, if there is one."""
        return next((dict(info) for info in self.host.machines() if info["name"] == self.name), None)

    def _compare(self, info: dict[str, Any]) -> None:
        """Compares what can change."""
        if self.options["publish"] is not None:
            publish = [wanted.port_of(text) for text in self.options["publish"]]
            ports = [port for network in self.host.networks() for port in network["ports"]]
            now = [dict(port) for port in ports if port["machine"] == self.name]
            self.ports = wanted.ports_request(now, publish)
            self.before["publish"] = sorted(wanted.port_text(port) for port in now)
            self.after["publish"] = sorted(wanted.port_text(port) for port in publish)
        have, settings = wanted.settings_now(info), wanted.settings_of(self.options)
        self.settings = wanted.settings_request(have, settings)
        self.before |= {key: have[key] for key in settings}
        self.after |= settings

    def carry_out(self) -> None:
        """Does what is to be done."""
        for step in self.steps:
            getattr(self, f"_{step}")()

    def _ports(self) -> None:
        self.host.ports(self.name, **self.ports)

    def _settings(self) -> None:
        self.host.set(self.name, **self.settings)

    def _start(self) -> None:
        self.host.start(self.name)

    def _unpause(self) -> None:
        self.host.unpause(self.name)

    def _resume(self) -> None:
        self.host.wait(self.host.resume(capsule=self.name))

    def _suspend(self) -> None:
        self.host.wait(self.host.suspend(self.name))

    def _stop(self) -> None:
        timeout, force = self.options["stop_timeout"], self.options["force"]
        self.host.stop(self.name, timeout_s=timeout, force=force)

    def _kill(self) -> None:
        self.host.stop(self.name, mode="kill")

    def _delete(self) -> None:
        self.host.delete(self.name)

    def _create(self) -> None:
        image, request = self.options["image"], self.request
        if not image:
            self.host.run(**request)
            return
        if not any(request["capsule"] in capsule["names"] for capsule in self.host.capsules()):
            self.host.wait(self.host.pull_image(name=image))
        self.host.derive(**request)

    def result(self, check_mode: bool) -> dict[str, Any]:
        """What the task says."""
        info = self.info if check_mode else self._find()
        patience = time.monotonic() + self.options["wait_address"]
        waits = self.options["wait_address"] > 0 and self.options["state"] == "running" and not check_mode
        while waits and not addresses_of(info or {}):
            if time.monotonic() > patience:
                seconds = self.options["wait_address"]
                raise RefusalError(f"{self.name} runs, but no address of it was known within {seconds} s")
            time.sleep(0.5)
            info = self._find()
        return {
            "changed": bool(self.steps),
            "steps": self.steps,
            "diff": {"before": self.before, "after": self.after},
            "machine": info,
            "address": next(iter(addresses_of(info or {})), None),
        }


def main() -> None:
    """Runs the module."""
    module = module_of(ARGUMENTS, **RULES)

    def work(host: Client) -> dict[str, Any]:
        plan = Plan(host, module.params)
        if not module.check_mode:
            plan.carry_out()
        return plan.result(module.check_mode)

    run(module, work)


if __name__ == "__main__":
    main()

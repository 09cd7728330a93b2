#!/usr/bin/python
"""Schedules of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: schedule
short_description: Schedules of a Whimbrel host
version_added: 0.1.0
description:
  - Makes and deletes schedules, by which the daemon takes checkpoints, pushes them, and tends its store.
  - A schedule cannot change. If the task says something else than it has, it fails and changes nothing.
  - Capsules of a schedule that is deleted stay, and no other schedule removes them.
options:
  name:
    description: Name of the schedule, up to 30 letters, digits, V(-) and V(_).
    type: str
    required: true
  state:
    description: Whether there is to be such a schedule.
    type: str
    choices: [present, absent]
    default: present
  work:
    description:
      - V(checkpoint) takes a capsule of O(machine).
      - V(push) copies the newest capsule of O(machine) to O(to).
      - V(verify) reads everything in the store or in O(bucket); V(gc) deletes what no capsule needs there.
    type: str
    choices: [checkpoint, push, verify, gc]
  machine:
    description: Name of the machine.
    type: str
  disks_only:
    description: Take capsules without memory.
    type: bool
    default: false
  to:
    description: Target of a push, a trusted host, V(pool:MANAGER[/FOLDER]) or V(s3://BUCKET[/PREFIX]).
    type: str
  bucket:
    description: Bucket to tend instead of the store, as V(s3://BUCKET[/PREFIX]).
    type: str
  every:
    description: Interval, like V(1d), V(6h) or V(30m).
    type: str
  at:
    description: Shift of the runs, by UTC. With O(every=1d), V(3h) is 3 o'clock.
    type: str
    default: 0h
  retain:
    description:
      - Capsules to retain, the newest and the newest of each of so many hours, days, weeks and months.
      - Without it all of them stay.
    type: dict
    suboptions:
      last:
        description: Number of the newest.
        type: int
      hourly:
        description: Number of hours.
        type: int
      daily:
        description: Number of days.
        type: int
      weekly:
        description: Number of weeks.
        type: int
      monthly:
        description: Number of months.
        type: int
extends_documentation_fragment: whimbrel.whimbrel.connection
attributes:
  check_mode:
    support: full
    description: Says what would be done, and does nothing.
  diff_mode:
    support: full
    description: Shows the schedule before and after.
author: The Whimbrel authors
"""

EXAMPLES = r"""
- name: A checkpoint each night
  whimbrel.whimbrel.schedule:
    name: nightly
    work: checkpoint
    machine: web
    every: 1d
    at: 3h
    retain: {daily: 7, weekly: 4}

- name: A copy of it on the other host
  whimbrel.whimbrel.schedule:
    name: offsite
    work: push
    machine: web
    to: beta
    every: 1d
    at: 4h
    retain: {daily: 7}
"""

RETURN = r"""
schedule:
  description: The schedule, as the API describes it; none if it is absent.
  returned: success
  type: dict
"""

import re
from typing import TYPE_CHECKING, Any

from ..module_utils.connection import RefusalError, module_of, run

if TYPE_CHECKING:
    from whimbrel import Client

ARGUMENTS: dict[str, dict[str, Any]] = {
    "name": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "work": {"type": "str", "choices": ["checkpoint", "push", "verify", "gc"]},
    "machine": {"type": "str"},
    "disks_only": {"type": "bool", "default": False},
    "to": {"type": "str"},
    "bucket": {"type": "str"},
    "every": {"type": "str"},
    "at": {"type": "str", "default": "0h"},
    "retain": {
        "type": "dict",
        "options": {key: {"type": "int"} for key in ("last", "hourly", "daily", "weekly", "monthly")},
    },
}
RULES: dict[str, Any] = {
    "required_if": [
        ("state", "present", ("work", "every")),
        ("work", "checkpoint", ("machine",)),
        ("work", "push", ("machine", "to")),
    ],
}

MILLISECONDS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000}


def duration_of(option: str, text: str) -> int:
    """Milliseconds of a duration like `1d` or `30m`."""
    parts = re.fullmatch(r"([0-9]+)([smhd])", text)
    if parts is None:
        raise RefusalError(f"{option}: {text} is no duration like 1d, 6h or 30m")
    return int(parts[1]) * MILLISECONDS[parts[2]]


def duration_text(duration: int) -> str:
    """Text of a duration, in the largest unit that it is a multiple of."""
    found = ((unit, size) for unit, size in MILLISECONDS.items() if duration % size == 0)
    unit, size = next(found, ("ms", 1))
    return f"{duration // size}{unit}"


def given(value: Any) -> Any:
    """A body without what is as usual."""
    if not isinstance(value, dict):
        return value
    return {key: given(field) for key, field in value.items() if field}


def wanted_of(options: dict[str, Any]) -> dict[str, Any]:
    """Body of the schedule that the task describes."""
    kind, to = options["work"], options["to"] or ""
    fields = {"verify": ["bucket"], "gc": ["bucket"], "checkpoint": ["machine", "disks_only", "retain"]}
    work = {"kind": kind, **{key: options[key] for key in fields.get(kind, ["machine", "retain"])}}
    if kind == "push":
        work["pool" if to.startswith(("pool:", "s3://")) else "host"] = to.removeprefix("pool:")
    every, at = duration_of("every", options["every"]), duration_of("at", options["at"])
    return {"work": given(work), "every_ms": every, "offset_ms": at}


def view(schedule: dict[str, Any] | None) -> dict[str, Any]:
    """What is compared of a schedule."""
    if not schedule:
        return {}
    every, at = schedule["every_ms"], schedule.get("offset_ms", 0)
    return {"work": given(schedule["work"]), "every": duration_text(every), "at": duration_text(at)}


def apply(host: Client, options: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """Makes or deletes the schedule, unless it is as the task says."""
    name, present = str(options["name"]), options["state"] == "present"
    before = next((dict(schedule) for schedule in host.schedules() if schedule["name"] == name), None)
    wanted = wanted_of(options) if present else {}
    now, then = view(before), view(wanted)
    for option, value in now.items() if present else []:
        if value != then[option]:
            raise RefusalError(f"{option} of {name} cannot change: it is {value} and not {then[option]}")
    changed = present == (before is None)
    after = before
    if changed and not present:
        after = None
        if not check_mode:
            host.delete_schedule(name)
    elif changed and not check_mode:
        after = dict(host.create_schedule(name=name, **wanted))
    return {"changed": changed, "schedule": after, "diff": {"before": now, "after": then}}


def main() -> None:
    """Runs the module."""
    module = module_of(ARGUMENTS, **RULES)
    run(module, lambda host: apply(host, module.params, module.check_mode))


if __name__ == "__main__":
    main()

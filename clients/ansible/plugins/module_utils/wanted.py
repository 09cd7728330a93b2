"""What a task wants of a machine, beside what the machine is. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ansible.module_utils.common.text.formatters import human_to_bytes

from .connection import RefusalError

#: Kinds of states in which a machine computes, or is about to.
RUNNING = ("starting", "running", "loading")
#: Most restarts in a row of a machine whose task says no other number.
RESTART_LIMIT = 10

#: What leads from one state to another; what is not here cannot be done.
WAYS: dict[tuple[str, str], list[str]] = {
    ("absent", "running"): ["create"],
    ("paused", "running"): ["unpause"],
    ("suspended", "running"): ["resume"],
    ("stopped", "running"): ["start"],
    ("crashed", "running"): ["start"],
    ("running", "stopped"): ["stop"],
    # A paused guest does not see the power button.
    ("paused", "stopped"): ["unpause", "stop"],
    ("crashed", "stopped"): [],
    ("running", "suspended"): ["suspend"],
    ("paused", "suspended"): ["suspend"],
    # The disks go anyway.
    ("running", "absent"): ["kill", "delete"],
    ("paused", "absent"): ["kill", "delete"],
    ("suspended", "absent"): ["delete"],
    ("stopped", "absent"): ["delete"],
    ("crashed", "absent"): ["delete"],
}

_PORT = re.compile(r"(?:([0-9.]+):)?([0-9]+):([0-9]+)(?:/(tcp|udp))?")


def way(name: str, state: str, wanted: str) -> list[str]:
    """Steps that lead from one state to another."""
    if state == wanted:
        return []
    steps = WAYS.get((state, wanted))
    if steps is not None:
        return steps
    if state == "absent":
        raise RefusalError(f"there is no machine {name} that could be {wanted}; state=running makes it")
    if state in ("stopped", "crashed", "suspended"):
        raise RefusalError(f"{name} is {state} and cannot become {wanted}; state=running is between the two")
    raise RefusalError(f"{name} is {state.replace('_', ' ')} and cannot become {wanted} here")


def state_of(info: Mapping[str, Any] | None) -> str:
    """State of a machine, in the words of a task where there is one."""
    if info is None:
        return "absent"
    kind = str(info["state"]["kind"])
    return "running" if kind in RUNNING else kind


def size_of(option: str, text: str) -> int:
    """Bytes of a size like `512M` or `2G`."""
    try:
        return int(human_to_bytes(text))
    except ValueError as error:
        raise RefusalError(f"{option}: {text} is no size like 512M or 2G") from error


def size_text(size: int) -> str:
    """Text of a size of memory, which is a number of MiB in a machine that exists."""
    whole, rest = divmod(size, 1 << 20)
    return f"{size} bytes" if rest else f"{whole} MiB"


def disk_of(text: str) -> dict[str, Any]:
    """Disk of a text `FILE[,size=SIZE]`."""
    path, found, size = text.partition(",size=")
    return {"path": path, "size": size_of("disks", size)} if found else {"path": path}


def nic_of(text: str) -> dict[str, Any]:
    """Network port of a text `BRIDGE[,mac=ADDRESS]`; the bridge `none` leaves it unplugged."""
    bridge, _, mac = text.partition(",mac=")
    return {"bridge": None if bridge == "none" else bridge, "mac": mac.lower() or None}


def port_of(text: str) -> dict[str, Any]:
    """Published port of a text `[ADDRESS:]PORT:PORT[/udp]`."""
    parts = _PORT.fullmatch(text)
    if parts is None:
        # YAML 1.1 reads 2222:22 as a number to the base of 60.
        example = "8080:80 or 127.0.0.1:5353:53/udp"
        raise RefusalError(f"publish: {text} is no port like {example}; write it in quotes")
    listen, port, guest_port, protocol = parts.groups()
    return {
        "listen": listen,
        "port": int(port),
        "guest_port": int(guest_port),
        "protocol": protocol or "tcp",
    }


def port_text(port: Mapping[str, Any]) -> str:
    """Text of a published port."""
    listen = f"{port['listen']}:" if port.get("listen") else ""
    protocol = "/udp" if port["protocol"] == "udp" else ""
    return f"{listen}{port['port']}:{port['guest_port']}{protocol}"


def labels_of(labels: Mapping[str, Any]) -> dict[str, str]:
    """Labels of a task, which YAML may have read as numbers."""
    for key, value in labels.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise RefusalError(f"labels: {key} has no text; write it in quotes")
    return {str(key): str(value) for key, value in labels.items()}


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a task names, as the API has them."""
    settings: dict[str, Any] = {}
    if options["labels"] is not None:
        settings["labels"] = labels_of(options["labels"])
    if options["note"] is not None:
        settings["note"] = options["note"]
    if options["autostart"] is not None:
        on = {"kind": "on", "order": options["autostart_order"], "delay_s": options["autostart_delay"]}
        settings["autostart"] = on if options["autostart"] else {"kind": "off"}
    if options["restart"] is not None:
        settings["restart"] = {"policy": options["restart"], "limit": options["restart_limit"]}
    return settings


def settings_now(info: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a machine, with what the API leaves out since it is as usual."""
    settings = info.get("settings", {})
    autostart = settings.get("autostart", {"kind": "off"})
    if autostart["kind"] == "on":
        autostart = {"order": 0, "delay_s": 0, **autostart}
    return {
        "labels": settings.get("labels", {}),
        "note": settings.get("note", ""),
        "autostart": autostart,
        "restart": {"policy": "no", "limit": RESTART_LIMIT, **settings.get("restart", {})},
    }


def settings_request(now: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Body that makes the settings what is wanted; empty if they are."""
    changes = {key: value for key, value in wanted.items() if value != now[key]}
    if "labels" in changes:
        # With null, a label is removed.
        changes["labels"] = {**dict.fromkeys(now["labels"]), **wanted["labels"]}
    return changes


def ports_request(now: Iterable[Mapping[str, Any]], wanted: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Body that makes the published ports those that are wanted; empty if they are."""
    kept, texts = [], {port_text(port): port for port in wanted}
    gone = []
    for port in now:
        text = port_text(port)
        if text in texts:
            kept.append(text)
        else:
            gone.append({"port": port["port"], "protocol": port["protocol"]})
    new = [port for text, port in texts.items() if text not in kept]
    return {"publish": new, "unpublish": gone} if new or gone else {}


def creation_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Body that makes a machine: of an image with `derive`, else with `run`."""
    nics, size = options["networks"], options["disk_size"]
    first_boot = {key: options[key] for key in ("ssh_keys", "user_data", "network_config")}
    first_boot = {key: value for key, value in first_boot.items() if value is not None}
    body: dict[str, Any] = {
        "name": options["name"],
        "memory": size_of("memory", options["memory"] or "1G"),
        "cpus": options["cpus"] or 1,
        "cpu": options["cpu"],
        "profile": options["profile"],
        "tpm": options["tpm"],
        "display": options["display"],
        "nics": None if nics is None else [nic_of(text) for text in nics],
        "publish": [port_of(text) for text in options["publish"] or []],
        "settings": settings_of(options),
    }
    if options["image"]:
        body["capsule"] = "image." + options["image"].replace("/", ".")
        body["disk_size"] = None if size is None else size_of("disk_size", size)
        # With a first boot of its own, even an empty one, the machine gets its own host name.
        return {**body, "cloud_init": first_boot}
    if not (options["disks"] or options["kernel"]):
        name = options["name"]
        raise RefusalError(f"there is no machine {name}; to make it, name an image, disks or a kernel")
    body["disks"] = [disk_of(text) for text in options["disks"] or []]
    body |= {key: options[key] for key in ("kernel", "initrd", "append")}
    return {**body, "cloud_init": first_boot or None}


def check_fixed(info: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuses what a machine that exists can no longer become."""
    if options["memory"] is not None:
        _same(info, "memory", size_text(info["memory"]), size_text(size_of("memory", options["memory"])))
    if options["cpus"] is not None:
        _same(info, "cpus", str(info["cpus"]), str(options["cpus"]))
    if options["networks"] is not None:
        wanted = [nic_of(text) for text in options["networks"]]
        now = [{"bridge": nic.get("bridge"), "mac": nic["mac"]} for nic in info["nics"]]
        # A task that names no hardware address takes the one that there is.
        for nic, have in zip(wanted, now, strict=False):
            nic["mac"] = nic["mac"] or have["mac"]
        _same(info, "networks", _nics_text(now), _nics_text(wanted))


def _nics_text(nics: Iterable[Mapping[str, Any]]) -> str:
    texts = [f"{nic['bridge'] or 'none'}" + (f",mac={nic['mac']}" if nic["mac"] else "") for nic in nics]
    return " ".join(texts) or "nothing"


def _same(info: Mapping[str, Any], option: str, now: str, wanted: str) -> None:
    if now != wanted:
        raise RefusalError(
            f"{option} of {info['name']} cannot change: it is {now} and not {wanted}, "
            "which only a new machine can have"
        )

"""The collection as its users have it: built, installed, and run by Ansible's programs on a real host."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from whimbrel import Client, errors

COLLECTION = Path(__file__).resolve().parents[1]
PROGRAMS = Path(sys.executable).parent
MODULES = ["host_info", "machine", "machine_info", "network", "schedule"]

#: Name of a module, its options, and keywords of the task.
Task = tuple[str, dict[str, Any], dict[str, Any]]


class Ansible:
    """Ansible's programs, with the collection of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Nothing of who runs the tests.
        mine = ("ANSIBLE_", "WHIMBREL_")
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
        self.environment |= {
            "ANSIBLE_HOME": str(folder / "home"),
            "ANSIBLE_COLLECTIONS_PATH": str(folder / "installed"),
            "ANSIBLE_LOCALHOST_WARNING": "false",
            # One process a task, not five.
            "ANSIBLE_PIPELINING": "true",
            "ANSIBLE_INVENTORY_UNPARSED_WARNING": "false",
            "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true",
            "LC_ALL": "C.UTF-8",
        }

    def run(self, program: str, *arguments: str | Path, fails: bool = False, token_file: str = "") -> str:
        """What a program prints; where it fails, what it complains about."""
        words = [str(PROGRAMS / program), *map(str, arguments)]
        environment = {**self.environment, "WHIMBREL_TOKEN_FILE": token_file}
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert (ended.returncode != 0) == fails, ended.stdout + ended.stderr
        return ended.stderr if fails else ended.stdout

    def install(self) -> None:
        """Builds the collection and installs it, as users do."""
        built = self.folder / "built"
        self.run("ansible-galaxy", "collection", "build", COLLECTION, "--output-path", built)
        [package] = built.glob("*.tar.gz")
        installed = self.folder / "installed"
        self.run("ansible-galaxy", "collection", "install", "--offline", "-p", installed, package)

    def play(self, connection: dict[str, Any], *tasks: Task, token_file: str = "") -> list[dict[str, Any]]:
        """Results of tasks; those that fail do not end the playbook."""
        found, playbook = self.folder / "results.json", self.folder / "playbook.yml"
        steps: list[dict[str, Any]] = [
            {f"whimbrel.whimbrel.{module}": options, "register": f"r{at}", "ignore_errors": True, **keywords}
            for at, (module, options, keywords) in enumerate(tasks)
        ]
        results = ", ".join(f"r{at}" for at in range(len(tasks)))
        content = "{{ [" + results + "] | to_json }}"
        steps.append({"ansible.builtin.copy": {"content": content, "dest": str(found)}})
        defaults = {"group/whimbrel.whimbrel.all": connection}
        play = {"hosts": "localhost", "gather_facts": False, "module_defaults": defaults, "tasks": steps}
        # JSON is YAML.
        playbook.write_text(json.dumps([play]), encoding="utf-8")
        self.run("ansible-playbook", playbook, token_file=token_file)
        answers: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))
        return answers

    def inventory(self, name: str, options: dict[str, Any], fails: bool = False) -> Any:
        """The inventory of a file with these options."""
        file = self.folder / name
        file.write_text(json.dumps({"plugin": "whimbrel.whimbrel.machines", **options}), encoding="utf-8")
        said = self.run("ansible-inventory", "-i", file, "--list", fails=fails)
        # Ansible marks texts that are no templates.
        return said if fails else json.loads(said, object_hook=lambda it: it.get("__ansible_unsafe", it))


@pytest.fixture(scope="session")
def ansible(tmp_path_factory: pytest.TempPathFactory) -> Ansible:
    """Ansible, with the collection installed."""
    it = Ansible(tmp_path_factory.mktemp("ansible"))
    it.install()
    return it


@pytest.fixture
def local(settings: Any) -> dict[str, Any]:
    """Options of the connection to the host's socket."""
    return {"socket": settings["socket"]}


def machine(name: str, check_mode: bool = False, **options: Any) -> Task:
    return ("machine", {"name": name, **options}, {"check_mode": check_mode})


def info(name: str) -> Task:
    return ("machine_info", {"name": name}, {})


def guest_of(settings: Any) -> dict[str, Any]:
    guest = settings["guest"]
    files = {key: guest[key] for key in ("kernel", "initrd", "append")}
    return {**files, "memory": f"{guest['memory'] >> 20}M"}


def steps_of(results: list[dict[str, Any]]) -> list[list[str]]:
    """What each task did; it says that it changed something if it did something."""
    for result in results:
        assert not result["failed"], result
        assert result["changed"] == bool(result["steps"]), result
    return [result["steps"] for result in results]


def refusal_of(result: dict[str, Any]) -> str:
    assert result["failed"], result
    assert not result.get("changed"), result
    return str(result["msg"])


def states_of(result: dict[str, Any]) -> list[str]:
    return [
        "running" if it["state"]["kind"] == "loading" else it["state"]["kind"] for it in result["machines"]
    ]


def test_the_documentation_says_what_the_modules_take(ansible: Ansible) -> None:
    for name in MODULES:
        whole = f"whimbrel.whimbrel.{name}"
        entry = json.loads(ansible.run("ansible-doc", "--json", whole))[whole]
        assert entry["examples"], name
        assert entry["return"], name
        documented = entry["doc"]["options"]
        arguments = arguments_of(ansible, name)
        assert set(documented) == set(arguments), name
        for option, argument in arguments.items():
            for key in ("type", "default", "choices", "required", "elements"):
                said = documented[option].get(key) or None
                assert said == (argument.get(key) or None), (name, option, key)
    plugin = "whimbrel.whimbrel.machines"
    entry = json.loads(ansible.run("ansible-doc", "--json", "-t", "inventory", plugin))[plugin]
    assert {"url", "token_file", "states", "keyed_groups"} <= set(entry["doc"]["options"])
    assert "belong to a machine for good" in ansible.run("ansible-doc", "whimbrel.whimbrel.machine")


def arguments_of(ansible: Ansible, name: str) -> dict[str, dict[str, Any]]:
    """Arguments of a module, those of the connection as well."""
    root = str(ansible.folder / "installed")
    sys.path.insert(0, root)
    try:
        base = "ansible_collections.whimbrel.whimbrel.plugins"
        module = importlib.import_module(f"{base}.modules.{name}")
        connection = importlib.import_module(f"{base}.module_utils.connection")
    finally:
        sys.path.remove(root)
    return {**connection.ARGUMENTS, **module.ARGUMENTS}


def test_a_machine_becomes_what_the_task_says(ansible: Ansible, settings: Any, local: Any) -> None:
    guest = {**guest_of(settings), "networks": ["ans0"], "publish": ["2222:22"], "labels": {"tier": "front"}}
    results = ansible.play(
        local,
        ("network", {"name": "ans0"}, {}),
        machine("ans", check_mode=True, **guest),
        info("ans"),
        machine("ans", **guest, wait_address=30),
        machine("ans", **guest),
        machine("ans", state="suspended", check_mode=True),
        info("ans"),
        machine("ans", state="suspended"),
        machine("ans", state="suspended"),
        machine("ans", state="stopped"),
        machine("ans", **guest),
        info("ans"),
    )
    assert results.pop(0)["changed"]
    assert states_of(results.pop(1)) == []
    assert states_of(results.pop(4)) == ["running"]
    assert states_of(results.pop()) == ["running"]
    assert "ans is suspended and cannot become stopped" in refusal_of(results.pop(6))
    assert steps_of(results) == [["create"], ["create"], [], ["suspend"], ["suspend"], [], ["resume"]]
    assert results[0]["machine"] is None
    assert results[1]["address"].startswith("10.")
    assert results[1]["machine"]["settings"]["labels"] == {"tier": "front"}
    assert results[4]["diff"] == {"before": {"state": "running"}, "after": {"state": "suspended"}}

    changes: dict[str, Any] = {
        "publish": ["127.0.0.1:2222:22", "5353:53/udp"],
        "labels": {"tier": "back", "n": 1},
    }
    changes |= {"note": "made by a test", "autostart": True, "restart": "no"}
    results = ansible.play(
        local,
        machine("ans", check_mode=True, **changes),
        machine("ans", **changes),
        machine("ans", **changes),
        machine("ans", labels={}, publish=[], note="", autostart=False),
        machine("ans", state="stopped", stop_timeout=1, force=True),
        machine("ans", state="stopped"),
        machine("ans"),
        machine("ans", state="absent", check_mode=True),
        info("ans"),
        machine("ans", state="absent"),
        machine("ans", state="absent"),
        ("network", {"name": "ans0", "state": "absent"}, {}),
    )
    assert results.pop()["changed"]
    assert states_of(results.pop(8)) == ["running"]
    both = ["ports", "settings"]
    ended = [["stop"], [], ["start"], ["kill", "delete"], ["kill", "delete"], []]
    assert steps_of(results) == [both, both, [], both, *ended]
    assert results[1]["diff"]["before"]["publish"] == ["2222:22"]
    assert results[1]["diff"]["after"]["publish"] == ["127.0.0.1:2222:22", "5353:53/udp"]
    assert results[1]["machine"]["settings"]["labels"] == {"tier": "back", "n": "1"}
    assert results[3]["machine"].get("settings", {}) == {}
    assert results[-1]["machine"] is None


def test_what_cannot_be_is_refused_in_a_sentence(ansible: Ansible, settings: Any, local: Any) -> None:
    guest = guest_of(settings)
    results = ansible.play(
        local,
        machine("fix", **guest),
        machine("fix", memory="256M", note="not set"),
        machine("fix", cpus=4),
        machine("fix", networks=["ans0"]),
        # What YAML makes of 2222:22 without quotes.
        machine("fix", publish=[2222 * 60 + 22]),
        machine("fix", memory="much"),
        machine("new", check_mode=True),
        machine("new", state="suspended"),
        machine("new", image="debian/12", kernel="/vmlinuz"),
        info("fix"),
        machine("fix", state="absent"),
    )
    assert not results[0]["failed"], results[0]
    assert results[-1]["changed"], results[-1]
    assert "note" not in results[-2]["machines"][0].get("settings", {})
    wanted = [
        "memory of fix cannot change: it is 192 MiB and not 256 MiB",
        "cpus of fix cannot change: it is 1 and not 4",
        "networks of fix cannot change: it is nothing and not ans0",
        "write it in quotes",
        "much is no size",
        "name an image, disks or a kernel",
        "there is no machine new that could be suspended",
        "mutually exclusive",
    ]
    for result, text in zip(results[1:-2], wanted, strict=True):
        assert text in refusal_of(result)


def test_a_machine_is_made_of_an_image(ansible: Ansible, settings: Any, local: Any, tmp_path: Path) -> None:
    disk = tmp_path / "empty.raw"
    disk.write_bytes(bytes(1 << 20))
    with Client(settings["socket"]) as host:
        host.wait(host.import_(path=str(disk), format="disk", name="image.mine.empty"))
        fields: dict[str, Any] = {
            "image": "mine/empty",
            "memory": "128M",
            "disk_size": "2M",
            "user_data": "#cloud-config\n",
        }
        results = ansible.play(
            local,
            machine("img", **fields),
            machine("img", **fields),
            machine("img", state="absent"),
            machine("img", image="no/such", check_mode=True),
        )
        assert steps_of(results) == [["create"], [], ["kill", "delete"], ["create"]]
        sizes = [disk["size"] for disk in results[0]["machine"]["disks"]]
        # The second disk is the one that cloud-init reads.
        assert sizes == [2 << 20, 2 << 20]
        host.remove("image.mine.empty")


def test_a_network_is_made_once_and_cannot_change(ansible: Ansible, local: Any) -> None:
    fields = {"name": "net0", "subnet": "10.99.1.0/24", "subnet6": "none"}
    results = ansible.play(
        local,
        ("network", fields, {"check_mode": True}),
        ("network", fields, {}),
        ("network", fields, {}),
        ("network", {"name": "net0", "subnet": "10.99.2.0/24"}, {}),
        ("network", {"name": "net0", "isolated": True}, {}),
        ("host_info", {}, {}),
        ("network", {"name": "net0", "state": "absent"}, {"check_mode": True}),
        ("network", {"name": "net0", "state": "absent"}, {}),
        ("network", {"name": "net0", "state": "absent"}, {}),
    )
    assert "subnet of net0 cannot change" in refusal_of(results.pop(3))
    assert "isolated of net0 cannot change" in refusal_of(results.pop(3))
    assert "net0" in [network["name"] for network in results.pop(3)["networks"]]
    assert [result["changed"] for result in results] == [True, True, False, True, True, False]
    assert results[1]["diff"]["after"]["subnet"] == "10.99.1.0/24"


def test_a_schedule_is_made_once_and_cannot_change(ansible: Ansible, settings: Any, local: Any) -> None:
    week = {"name": "tidy", "work": "gc", "every": "7d"}
    night: dict[str, Any] = {
        "name": "night",
        "work": "checkpoint",
        "machine": "sch",
        "every": "1d",
        "at": "3h",
    }
    night["retain"] = {"daily": 7}
    absent = {"state": "absent"}
    with Client(settings["socket"]) as host:
        host.run(name="sch", **settings["guest"])
        results = ansible.play(
            local,
            ("schedule", night, {"check_mode": True}),
            ("schedule", night, {}),
            ("schedule", night, {}),
            ("schedule", {**night, "every": "2d"}, {}),
            ("schedule", {**night, "retain": {"daily": 8}}, {}),
            ("schedule", {**night, "at": "three"}, {}),
            ("schedule", week, {}),
            ("schedule", week, {}),
            ("schedule", {"name": "night", **absent}, {}),
            ("schedule", {"name": "night", **absent}, {}),
            ("schedule", {"name": "tidy", **absent}, {}),
        )
        host.stop("sch", mode="kill")
        host.delete("sch")
    for text in ["it is 1d and not 2d", "work of night cannot change", "three is no duration"]:
        assert text in refusal_of(results.pop(3))
    changed = [result["changed"] for result in results]
    assert changed == [True, True, False, True, False, True, False, True]
    assert results[1]["schedule"]["work"]["retain"]["daily"] == 7
    work = {"kind": "checkpoint", "machine": "sch", "retain": {"daily": 7}}
    assert results[0]["diff"] == {"before": {}, "after": {"work": work, "every": "1d", "at": "3h"}}


def test_the_inventory_has_machines_with_addresses_and_groups(
    ansible: Ansible, settings: Any, local: Any
) -> None:
    guest = {**settings["guest"], "nics": [{"bridge": "inv0"}]}
    with Client(settings["socket"]) as host:
        host.create_network(name="inv0")
        host.run(name="inv", settings={"labels": {"tier": "front"}, "note": "{{ 6 * 7 }}"}, **guest)
        host.run(name="off", **settings["guest"])
        host.stop("off", mode="kill")
        whole = ansible.inventory("whimbrel.yml", local)
        variables = whole["_meta"]["hostvars"]["inv"]
        assert list(whole["_meta"]["hostvars"]) == ["inv"]
        assert variables["ansible_host"] == host.network("inv0")["machines"][0]["address"]
        assert (variables["whimbrel_state"], variables["whimbrel_cpus"]) == ("running", 1)
        words = ["inv", "-m", "ansible.builtin.debug", "-a", "var=whimbrel_note"]
        assert "6 * 7" in ansible.run("ansible", "-i", ansible.folder / "whimbrel.yml", *words)
        assert whole["label_tier_front"]["hosts"] == whole["state_running"]["hosts"] == ["inv"]
        keyed = {"states": [], "keyed_groups": [{"key": "whimbrel_labels.tier", "prefix": "tier"}]}
        whole = ansible.inventory("all.whimbrel.yml", {**local, **keyed})
        assert sorted(whole["_meta"]["hostvars"]) == ["inv", "off"]
        assert whole["tier_front"]["hosts"] == ["inv"]
        host.stop("inv", mode="kill")
        for name in ("inv", "off"):
            host.delete(name)
        host.delete_network("inv0")


def test_a_token_may_do_what_its_role_allows(ansible: Ansible, settings: Any, tmp_path: Path) -> None:
    tls = settings["tls"]
    elsewhere = {"url": tls["url"], "fingerprint": tls["fingerprint"]}
    file = tmp_path / "token"
    file.write_text(tls["viewer"] + "\n", encoding="utf-8")
    results = ansible.play(
        elsewhere,
        ("host_info", {}, {}),
        ("network", {"name": "no0"}, {}),
        ("host_info", {"token": "whimbrel_wrong"}, {}),
        ("host_info", {"fingerprint": "sha256:" + "00" * 32}, {}),
        token_file=str(file),
    )
    assert results[0]["host"]["version"]
    assert "(forbidden)" in refusal_of(results[1])
    assert "(unauthenticated)" in refusal_of(results[2])
    assert (results[1]["code"], results[2]["code"]) == ("forbidden", "unauthenticated")
    assert "another certificate" in refusal_of(results[3])
    [missing] = ansible.play(elsewhere, ("host_info", {}, {}))
    assert "wants a token" in refusal_of(missing)
    assert ansible.inventory("whimbrel.yml", {**elsewhere, "token_file": str(file), "states": []})
    refused = ansible.inventory("whimbrel.yml", {**elsewhere, "token": "whimbrel_wrong"}, fails=True)
    assert "(unauthenticated)" in refused
    with Client(settings["socket"]) as host, pytest.raises(errors.NotFoundError):
        host.network("no0")

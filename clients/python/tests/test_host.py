"""Both clients on a real host with a real guest."""

from __future__ import annotations

from typing import Any

import anyio
import jsonschema  # type: ignore[import-untyped]
import pytest

from whimbrel import AsyncClient, Client, ConnectError, errors
from whimbrel.models import MachineInfo, Operation


def machine_of(host: Client, settings: Any, name: str) -> MachineInfo:
    guest = settings["guest"]
    return host.run(
        name=name,
        memory=guest["memory"],
        kernel=guest["kernel"],
        initrd=guest["initrd"],
        append=guest["append"],
    )


def test_a_machine_is_launched_saved_suspended_resumed_and_deleted(host: Client, settings: Any) -> None:
    assert machine_of(host, settings, "py")["state"]["kind"] == "running"
    assert next(host.follow_console("py")), "the guest prints while it boots"
    with pytest.raises(errors.NameTakenError):
        machine_of(host, settings, "py")
    with pytest.raises(errors.BusyError):
        host.delete("py")
    assert host.pause("py")["state"]["kind"] == "paused"
    assert host.unpause("py")["state"]["kind"] == "running"

    stages: list[str] = []

    def progress(operation: Operation) -> None:
        stages.append(operation["state"])

    begun = host.checkpoint("py", tag="py-first", labels={"made": "by python"})
    result = host.wait(begun, progress=progress)
    assert result["kind"] == "checkpoint"
    assert (stages[-1], host.operation(begun["id"])["state"]) == ("succeeded", "succeeded")
    capsule = host.capsule("py-first")
    assert (capsule["id"], capsule["labels"]) == (result["capsule"], {"made": "by python"})

    assert host.wait(host.suspend("py", tag="py-second"))["kind"] == "suspend"
    assert host.machine("py")["state"]["kind"] == "suspended"
    assert [node["id"] for node in host.log("py-second")][1:] == [capsule["id"]]
    assert host.diff("py-first", "py-second")["images"]
    resumed = host.wait(host.resume(capsule="py-second", name="py-again"))
    assert resumed["kind"] == "resume"
    assert resumed["machines"] == ["py-again"]
    assert host.console_log("py-again", bytes=100) is not None
    host.stop("py-again", mode="kill")
    host.delete("py-again")
    with pytest.raises(errors.NotFoundError) as caught:
        host.machine("py-again")
    assert "py-again" in str(caught.value)

    happened = [(event["kind"], event["subject"]) for event in host.events(follow=False)]
    for wanted in [("operation_started", "py"), ("operation_ended", "py"), ("machine_removed", "py-again")]:
        assert wanted in happened
    host.remove("py-first")
    host.remove("py-second")


@pytest.mark.anyio
async def test_the_asynchronous_client_waits_and_listens_at_once(settings: Any) -> None:
    async with AsyncClient(settings["socket"]) as host:
        guest = settings["guest"]
        last = [event["number"] async for event in host.events(follow=False)][-1]
        heard: list[str] = []

        async def listen() -> None:
            async for event in host.events(since=last):
                heard.append(event["kind"])
                if event["kind"] == "machine_removed" and event["subject"] == "async":
                    return

        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen)
                await host.run(
                    name="async",
                    memory=guest["memory"],
                    kernel=guest["kernel"],
                    initrd=guest["initrd"],
                    append=guest["append"],
                )
                async for piece in host.follow_console("async"):
                    assert piece
                    break
                result = await host.wait(await host.checkpoint("async", tag="async-one"))
                assert result["kind"] == "checkpoint"
                await host.stop("async", mode="kill")
                await host.delete("async")
        assert {"machine", "operation_started", "operation_ended"} <= set(heard)
        with pytest.raises(errors.NotFoundError):
            await host.machine("async")


def test_over_tls_a_token_may_do_what_its_role_allows(settings: Any) -> None:
    tls = settings["tls"]
    with Client(tls["url"], token=tls["viewer"], fingerprint=tls["fingerprint"]) as viewer:
        assert viewer.caller()["role"] == "viewer"
        assert viewer.machines() is not None
        with pytest.raises(errors.ForbiddenError):
            viewer.gc()
    with (
        Client(tls["url"], token="whimbrel_wrong", fingerprint=tls["fingerprint"]) as stranger,
        pytest.raises(errors.UnauthenticatedError),
    ):
        stranger.host()


@pytest.mark.anyio
async def test_a_wrong_certificate_ends_the_connection_before_the_token_is_sent(settings: Any) -> None:
    tls, failures = settings["tls"], 0
    wrong = "sha256:" + "00" * 32
    # More than the failed logins after which an address is shut out.
    for _ in range(12):
        with Client(tls["url"], token="whimbrel_wrong", fingerprint=wrong) as client:
            with pytest.raises(ConnectError, match=tls["fingerprint"]):
                client.host()
            failures += 1
    async with AsyncClient(tls["url"], token="whimbrel_wrong", fingerprint=wrong) as other:
        with pytest.raises(ConnectError, match=tls["fingerprint"]):
            await other.host()
    with Client(tls["url"], token="whimbrel_wrong") as unpinned, pytest.raises(ConnectError):
        unpinned.host()
    async with AsyncClient(tls["url"], token=tls["viewer"], fingerprint=tls["fingerprint"]) as viewer:
        assert (await viewer.caller())["role"] == "viewer"
    assert failures == 12


def schema_of(document: Any, schema: Any) -> Any:
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


def test_answers_are_what_the_document_says(host: Client, settings: Any, document: Any) -> None:
    machine_of(host, settings, "shape")
    host.wait(host.checkpoint("shape", tag="shape-one"))
    host.create_schedule(name="shape-gc", work={"kind": "gc"}, every_ms=366 * 86400000)
    host.run_schedule("shape-gc")
    names = {"machines": "shape", "refs": "shape-one", "schedules": "shape-gc"}
    values = {"capsule": "shape-one", "other": "shape-one", "id": str(host.operations()[0]["id"])}
    tried = []
    for template, methods in document["paths"].items():
        get = methods.get("get", {})
        content = get.get("responses", {}).get("200", {}).get("content", {})
        if "application/json" not in content or template in ("/v1/remote/{host}", "/v1/networks/{name}"):
            continue
        name = names.get(template.split("/")[2], "")
        path = template.format(name=name, **values)
        answer = host._json("GET", path)
        schema_of(document, content["application/json"].get("schema") or {}).validate(answer)
        tried.append(template)
    assert len(tried) > 20, tried
    host.delete_schedule("shape-gc")
    host.stop("shape", mode="kill")
    host.delete("shape")
    host.remove("shape-one")


def test_refusals_have_a_documented_status_and_say_why(host: Client, document: Any) -> None:
    error = schema_of(document, {"$ref": "#/components/schemas/ApiError"})
    bodies = [None, "{", "[]", '{"no_such_field": 1}', '"\\ud800"']
    tried = 0
    for template, methods in document["paths"].items():
        for method, call in methods.items():
            marks = template.count("{")
            has_body = "requestBody" in call
            # Without a name or a body there is nothing that could be wrong.
            if not marks and not has_body:
                continue
            for body in bodies if has_body else [None]:
                for value in ["no-such-thing", "%00", "a" * 300, "9" * 30] if marks else [""]:
                    path = template
                    while "{" in path:
                        path = path[: path.index("{")] + value + path[path.index("}") + 1 :]
                    answer = host._http.request(method.upper(), path, content=body)
                    if answer.status_code < 300:
                        # An empty body stands for `{}`, which is enough for some.
                        assert body is None or value, (method, path, body)
                        continue
                    assert str(answer.status_code) in call["responses"], (method, path, body, answer.text)
                    error.validate(answer.json())
                    tried += 1
    queries = ["console/log?bytes=x", "console/log?follow=7"]
    for path in [*(f"/v1/machines/x/{query}" for query in queries), "/v1/events?since=x"]:
        answer = host._http.get(path)
        assert answer.status_code == 400
        error.validate(answer.json())
    assert tried > 200

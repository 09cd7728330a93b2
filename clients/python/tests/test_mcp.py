"""`whimbrel mcp` as the official client of the Model Context Protocol sees it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import mcp
import pytest

from whimbrel import Client


def server(settings: Any, *options: str) -> mcp.StdioServerParameters:
    arguments = ["--socket", settings["socket"], "mcp", *options]
    return mcp.StdioServerParameters(command=settings["program"], args=arguments)


def text_of(result: Any) -> str:
    [block] = result.content
    assert block.type == "text"
    return str(block.text)


async def call(client: mcp.Client, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, text_of(result)
    return json.loads(text_of(result) or "null")


@pytest.mark.anyio
async def test_without_leave_a_model_can_only_look(settings: Any) -> None:
    async with mcp.Client(server(settings)) as client:
        listed = await client.list_tools()
        names = {tool.name for tool in listed.tools}
        assert {"machines", "machine", "console_log", "capsules", "operation", "host_events"} <= names
        assert not names & {"run", "delete", "suspend", "create_token", "console"}
        assert all(tool.annotations and tool.annotations.read_only_hint for tool in listed.tools)
        assert (await call(client, "host"))["name"]
        refused = await client.call_tool("machine", {"name": "nowhere"})
        assert refused.is_error
        assert json.loads(text_of(refused))["code"] == "not_found"
        with pytest.raises(mcp.MCPError, match="--allow-changes"):
            await client.call_tool("delete", {"name": "nowhere"})


@pytest.mark.anyio
async def test_with_leave_a_machine_is_launched_saved_rewound_and_deleted(
    settings: Any, host: Client
) -> None:
    guest = settings["guest"]
    async with mcp.Client(server(settings, "--allow-changes")) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools["delete"].annotations
        assert tools["delete"].annotations.destructive_hint
        assert tools["checkpoint"].annotations
        assert not tools["checkpoint"].annotations.destructive_hint
        for tool in tools.values():
            jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        await call(client, "run", name="model", **guest)
        assert next(host.follow_console("model"))
        printed = await client.call_tool("console_log", {"name": "model", "bytes": 1000})
        assert not printed.is_error
        saved = await call(client, "checkpoint", name="model", tag="model-one")
        assert saved["state"] == "succeeded"
        await call(client, "stop", name="model", mode="kill")
        await call(client, "delete", name="model")
        resumed = await call(client, "resume", capsule="model-one", name="model")
        assert resumed["result"]["machines"] == ["model"]
        assert [machine["name"] for machine in await call(client, "machines")] == ["model"]
        happened = await call(client, "host_events")
        assert ("machine_removed", "model") in {(event["kind"], event["subject"]) for event in happened}
        wrong = await client.call_tool("stop", {"name": "model", "how": "gently"})
        assert wrong.is_error
        assert "how" in text_of(wrong)
        await call(client, "stop", name="model", mode="kill")
        await call(client, "delete", name="model")
        await call(client, "remove", capsule="model-one")


@pytest.mark.anyio
async def test_a_token_of_a_viewer_offers_no_changes(settings: Any, tmp_path: Any) -> None:
    tls = settings["tls"]
    token = tmp_path / "token"
    token.write_text(tls["viewer"], encoding="utf-8")
    place = ["--host", tls["url"], "--fingerprint", tls["fingerprint"], "--token-file", str(token)]
    parameters = mcp.StdioServerParameters(
        command=settings["program"], args=[*place, "mcp", "--allow-changes"]
    )
    async with mcp.Client(parameters) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert "machines" in names
        assert not names & {"run", "delete", "trust"}

"""What needs no host: generated files, answers that are not as the API says, addresses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

from whimbrel import Client, OperationCancelledError, ProtocolError, WhimbrelError, errors
from whimbrel import _answers as answers
from whimbrel._address import Address

GENERATE = Path(__file__).resolve().parents[1] / "generate.py"


def answering(*pieces: bytes, status: int = 200) -> Client:
    """A client whose daemon gives this answer to everything."""
    client = Client("/nonexistent")
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=iter(pieces)))
    client._http = httpx.Client(base_url="http://whimbrel", transport=transport)
    return client


def test_generated_files_are_what_the_document_gives() -> None:
    check = subprocess.run(
        [sys.executable, str(GENERATE), "--check"], check=False, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr


def test_an_example_that_its_schema_forbids_is_found(document: Any) -> None:
    schemas = document["components"]["schemas"]
    tried = 0
    for name, schema in schemas.items():
        for example in schema.get("examples", []):
            whole = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
            jsonschema.Draft202012Validator(whole).validate(example)
            tried += 1
    assert tried > 50


@pytest.mark.parametrize("code", errors.BY_CODE)
def test_each_code_is_an_error_of_its_own_class(code: str, document: Any) -> None:
    assert code in document["components"]["schemas"]["ErrorCode"]["enum"]
    body = {"code": code, "message": "no", "causes": ["because", "of that"], "hint": "do this"}
    with pytest.raises(errors.BY_CODE[code]) as caught:
        answering(json.dumps(body).encode(), status=500).machines()
    assert type(caught.value) is errors.BY_CODE[code]
    assert (str(caught.value), caught.value.hint) == ("no: because: of that", "do this")


def test_a_code_of_a_newer_host_keeps_its_message() -> None:
    with pytest.raises(errors.InternalError, match="it was eaten") as caught:
        answering(b'{"code": "eaten_by_dog", "message": "it was eaten"}', status=500).machines()
    assert caught.value.code == "eaten_by_dog"


def test_answers_that_are_no_json_are_errors_of_this_package() -> None:
    with pytest.raises(ProtocolError):
        answering(b"<html>").machines()
    with pytest.raises(errors.InternalError, match="502"):
        answering(b"<html>", status=502).machines()


def test_an_endless_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ANSWER_MAX", 100)
    monkeypatch.setattr(answers, "LINE_MAX", 100)
    with pytest.raises(ProtocolError, match="longer"):
        answering(b"x" * 60, b"x" * 60).machines()
    with pytest.raises(ProtocolError, match="longer"):
        list(answering(b"x" * 60, b"x" * 60).events())


def test_lines_come_whole_from_pieces_of_any_size() -> None:
    text = 'data: {"number": 1, "text": "ä"}\n\n:\n\nid: 2\ndata: {"number": 2}\n\n'.encode()
    for size in range(1, len(text) + 1):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = list(answering(*pieces).events())
        assert [event["number"] for event in found] == [1, 2]


def state(**fields: Any) -> bytes:
    operation = {"id": 7, "kind": "gc", "subject": "", "started_ms": 1, "progress": {}, **fields}
    return json.dumps(operation).encode() + b"\n"


def test_the_end_of_an_operation_is_a_result_or_an_error() -> None:
    running = state(state="running")
    result = {"kind": "gc", "freed": 1, "moved": 0, "packs_waiting": 0, "stored": 0}
    seen: list[str] = []
    client = answering(running, state(state="succeeded", result=result))
    assert client.wait(7, progress=lambda operation: seen.append(operation["state"])) == result
    assert seen == ["running", "succeeded"]
    with pytest.raises(errors.BusyError, match="in use"):
        answering(running, state(state="failed", error={"code": "busy", "message": "in use"})).wait(7)
    with pytest.raises(OperationCancelledError, match="nothing was stored"):
        answering(running, state(state="cancelled", left="nothing was stored")).wait(7)
    with pytest.raises(ProtocolError, match="operation 7"):
        answering(running).wait(7)


def test_names_do_not_become_other_paths() -> None:
    paths: list[str] = []

    def note(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path.decode())
        return httpx.Response(204)

    client = Client("/nonexistent")
    client._http = httpx.Client(base_url="http://whimbrel", transport=httpx.MockTransport(note))
    client.delete("web/../../tokens?x#y")
    assert paths == ["/v1/machines/web%2F..%2F..%2Ftokens%3Fx%23y"]


def test_addresses_without_tls_or_token_are_refused() -> None:
    good = Address.of("https://10.0.0.1", "secret", "sha256:" + "ab" * 32)
    assert good.url == "https://10.0.0.1:7443"
    assert "secret" not in repr(good)
    assert Address.of("https://[2001:db8::1]:9", "t", None).url == "https://[2001:db8::1]:9"
    for place, token, fingerprint in [
        ("http://alpha", "t", None),
        ("https://alpha", None, None),
        ("https://alpha/v1", "t", None),
        ("https://a@alpha", "t", None),
        ("https://alpha", "t", "sha256:abcd"),
        ("https://alpha", "t", "x" * 64),
    ]:
        with pytest.raises(WhimbrelError):
            Address.of(place, token, fingerprint)


def test_without_an_address_the_environment_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ["WHIMBREL_HOST", "WHIMBREL_SOCKET", "WHIMBREL_TOKEN_FILE", "WHIMBREL_FINGERPRINT"]:
        monkeypatch.delenv(name, raising=False)
    assert Address.of(None, None, None).socket == "/run/whimbrel/host.sock"
    (tmp_path / "token").write_text("whimbrel_x\n", encoding="utf-8")
    monkeypatch.setenv("WHIMBREL_HOST", "https://beta:9")
    monkeypatch.setenv("WHIMBREL_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("WHIMBREL_FINGERPRINT", "AB:" * 31 + "AB")
    address = Address.of(None, None, None)
    assert (address.url, address.token, address.fingerprint) == ("https://beta:9", "whimbrel_x", b"\xab" * 32)


def test_no_daemon_is_an_error_of_the_connection() -> None:
    with pytest.raises(errors.ConnectError, match="/nonexistent"):
        Client("/nonexistent").machines()

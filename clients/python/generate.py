"""Writes the generated layer of the package from the OpenAPI document: `python3 clients/python/generate.py`.

Types become `TypedDict`s, so an answer is the JSON that came, and a field of a newer host is no error.
Calls become methods, once blocking and once asynchronous; a body's fields are their keyword arguments.
With `--check` nothing is written, and the exit code says whether the files are what the document gives.
Only the standard library is used, so the command needs no environment.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent.parent / "docs" / "openapi.json"
TARGET = HERE / "src" / "whimbrel" / "_generated"
WIDTH = 100

HEADER = '''"""{what} Written by generate.py from docs/openapi.json; change those."""

from __future__ import annotations

'''

SIMPLE = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "None"}

# Streams and upgrades: the clients have methods of their own for them, or none.
BY_HAND = {"hostEvents", "events", "console", "wire", "dirty_trace"}

# Names that the language has taken.
RENAMED = {"import": "import_"}


def camel(text: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[^A-Za-z0-9]+", text))


def snake(text: str) -> str:
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()
    return RENAMED.get(name, name)


def wrapped(text: str, indent: str, prefix: str) -> list[str]:
    width = WIDTH - len(indent)
    return [indent + line for line in textwrap.wrap(prefix + text, width, subsequent_indent=prefix)]


def docstring(text: str, indent: str) -> list[str]:
    text = text.replace("\\", "\\\\")
    text = text if text.endswith(".") else text + "."
    if len(text) + len(indent) + 6 <= WIDTH:
        return [f'{indent}"""{text}"""']
    lines = textwrap.wrap(text, WIDTH - len(indent) - 3)
    return [f'{indent}"""{lines[0]}', *(indent + line for line in lines[1:]), f'{indent}"""']


@dataclass
class Shape:
    """Fields of an object, and the value of the field that tells it from other variants."""

    fields: dict[str, Any] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    tag: str = ""
    about: str = ""

    def merged(self, other: Shape) -> Shape:
        return Shape(
            {**self.fields, **other.fields},
            self.required | other.required,
            self.tag + other.tag,
            self.about or other.about,
        )


class Types:
    """Python's types of the schemas."""

    def __init__(self, schemas: dict[str, Any]) -> None:
        self.schemas = schemas
        self.aliases: list[str] = []
        self.classes: list[str] = []
        self.unions: list[str] = []
        self.names: list[str] = []
        for name, schema in schemas.items():
            self.add(name, schema)

    def expression(self, schema: Any) -> str:
        """Type of a field."""
        if not isinstance(schema, dict) or not schema:
            return "Any"
        if "$ref" in schema:
            return str(schema["$ref"]).rsplit("/", 1)[1]
        if "enum" in schema:
            return "Literal[" + ", ".join(json.dumps(value) for value in schema["enum"]) + "]"
        if "oneOf" in schema:
            return " | ".join(self.expression(one) for one in schema["oneOf"])
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(self.expression({**schema, "type": one}) for one in kind)
        if kind == "array" and "prefixItems" in schema:
            return "list[" + self.expression(schema["prefixItems"][0]) + "]"
        if kind == "array":
            return "list[" + self.expression(schema.get("items")) + "]"
        if kind == "object":
            return "dict[str, " + self.expression(schema.get("additionalProperties")) + "]"
        return SIMPLE.get(str(kind), "Any")

    def shapes(self, schema: Any) -> list[Shape]:
        """Variants of an object: one, unless a choice is a part of it."""
        if "$ref" in schema:
            return self.shapes(self.schemas[schema["$ref"].rsplit("/", 1)[1]])
        about = str(schema.get("description", ""))
        if "allOf" in schema:
            found = [Shape()]
            # Backwards: fields of its own come before those that it contains.
            for part in reversed(schema["allOf"]):
                found = [one.merged(two) for one in found for two in self.shapes(part)]
            return [Shape(one.fields, one.required, one.tag, about) for one in found]
        if "oneOf" in schema:
            return [shape for one in schema["oneOf"] for shape in self.shapes(one)]
        fields = schema.get("properties", {})
        tags = [value["enum"][0] for value in fields.values() if len(value.get("enum", [])) == 1]
        return [Shape(fields, set(schema.get("required", [])), "".join(tags), about)]

    def add(self, name: str, schema: Any) -> None:
        self.names.append(name)
        about = str(schema.get("description", name))
        if "enum" in schema or (schema.get("type") != "object" and "type" in schema):
            self.aliases += [*wrapped(about, "", "#: "), *alias(name, self.expression(schema)), ""]
            return
        shapes = self.shapes(schema)
        if len(shapes) == 1:
            shapes[0].about = about
            self.classes += self.typed_dict(name, shapes[0])
            return
        variants = [name + camel(shape.tag) for shape in shapes]
        if len(set(variants)) != len(variants):
            raise SystemExit(f"{name}: its variants cannot be told apart: {variants}")
        for variant, shape in zip(variants, shapes, strict=True):
            self.names.append(variant)
            self.classes += self.typed_dict(variant, shape)
        self.unions += [*wrapped(about, "", "#: ")]
        self.unions += [f"{name} = Union[", *(f"    {variant}," for variant in variants), "]", ""]

    def typed_dict(self, name: str, shape: Shape) -> list[str]:
        def kind(key: str, schema: Any) -> str:
            expression = self.expression(schema)
            return expression if key in shape.required else f"NotRequired[{expression}]"

        about = shape.about or name
        if any(keyword.iskeyword(key) for key in shape.fields):
            lines = wrapped(about, "", "#: ")
            lines += [f"{name} = TypedDict(", f'    "{name}",', "    {"]
            for key, schema in shape.fields.items():
                expression = kind(key, schema)
                # Types that have quotes of their own stand in single ones.
                mark = "'" if '"' in expression else '"'
                lines.append(f'        "{key}": {mark}{expression}{mark},')
            return [*lines, "    },", ")", "", ""]
        lines = [f"class {name}(TypedDict):", *docstring(about, "    "), ""]
        for key, schema in shape.fields.items():
            if "description" in schema:
                lines += wrapped(str(schema["description"]), "    ", "#: ")
            lines.append(f"    {key}: {kind(key, schema)}")
        return [*lines, "", ""]


def alias(name: str, expression: str) -> list[str]:
    line = f"{name} = {expression}"
    if len(line) <= WIDTH:
        return [line]
    values = expression.removeprefix("Literal[").removesuffix("]").split(", ")
    return [f"{name} = Literal[", *(f"    {value}," for value in values), "]"]


def models(document: Any) -> str:
    types = Types(document["components"]["schemas"])
    text = HEADER.format(what="Types of the API.")
    text += (
        "from typing import Any, Literal, TypedDict, Union\n\nfrom typing_extensions import NotRequired\n\n"
    )
    text += "\n".join(types.aliases) + "\n\n" + "\n".join(types.classes) + "\n".join(types.unions)
    names = sorted(types.names)
    text += "\n__all__ = [\n" + "".join(f'    "{name}",\n' for name in names) + "]\n"
    return text if "Any" in text.split("TypedDict", 2)[2] else text.replace("Any, ", "", 1)


def errors(document: Any) -> str:
    text = HEADER.format(what="Errors of the API, a class for each code.")
    text += "from .._error import ApiError\n"
    table = []
    meanings = {}
    for response in document["components"]["responses"].values():
        for code, example in response["content"]["application/json"]["examples"].items():
            meanings[code] = example["summary"]
    for code in document["components"]["schemas"]["ErrorCode"]["enum"]:
        name = camel(code) + "Error"
        about = meanings[code][0].upper() + meanings[code][1:]
        text += "\n\n" + "\n".join([f"class {name}(ApiError):", *docstring(about, "    ")]) + "\n"
        table.append(f'    "{code}": {name},\n')
    text += "\n\n#: Class of each code.\nBY_CODE: dict[str, type[ApiError]] = {\n" + "".join(table) + "}\n"
    names = sorted(camel(code) + "Error" for code in document["components"]["schemas"]["ErrorCode"]["enum"])
    return text + "\n__all__ = [\n" + "".join(f'    "{name}",\n' for name in ["BY_CODE", *names]) + "]\n"


@dataclass
class Call:
    """One method of the clients."""

    name: str
    method: str
    path: str
    about: str
    positional: dict[str, str]
    query: dict[str, str]
    body: dict[str, tuple[str, bool]]
    has_body: bool
    answer: str
    reader: str

    def lines(self, asynchronous: bool) -> list[str]:
        wait = "await " if asynchronous else ""
        arguments = ["self", *(f"{name}: {kind}" for name, kind in self.positional.items())]
        options = []
        for name, (kind, required) in sorted(self.body.items(), key=lambda item: not item[1][1]):
            options.append(
                f"{python(name)}: {kind}" if required else f"{python(name)}: {optional(kind)} = None"
            )
        options += [f"{name}: {kind} | None = None" for name, kind in self.query.items()]
        arguments += ["*", *options] if options else []
        define = "async def" if asynchronous else "def"
        head = f"    {define} {self.name}({', '.join(arguments)}) -> {self.answer}:"
        lines = [head]
        if len(head) > WIDTH:
            lines = [f"    {define} {self.name}(", *(f"        {one}," for one in arguments)]
            lines.append(f"    ) -> {self.answer}:")
        lines += docstring(self.about, "        ")
        path = self.path
        for name in self.positional:
            path = path.replace("{" + name + "}", f"{{quote({name})}}")
        text = f'f"{path}"' if self.positional else f'"{path}"'
        maps = {}
        if self.query:
            maps["query"] = [f'"{name}": {name}' for name in self.query]
        if self.has_body:
            maps["body"] = [f'"{name}": {python(name)}' for name in self.body]
        call, plain = f"{wait}self._{self.reader}", [f'"{self.method}"', text]
        if self.answer == "None":
            return [*lines, *invocation(call, plain, maps), ""]
        if self.reader == "text" or self.answer == "Any":
            return [*lines, *invocation(f"return {call}", plain, maps), ""]
        call = f"answer: {self.answer} = {call}"
        return [*lines, *invocation(call, plain, maps), "        return answer", ""]


def invocation(begin: str, plain: list[str], maps: dict[str, list[str]]) -> list[str]:
    """A call with its arguments, in one line if that is short enough."""
    short = plain + [f"{name}={{{', '.join(items)}}}" for name, items in maps.items()]
    line = f"        {begin}({', '.join(short)})"
    if len(line) <= WIDTH:
        return [line]
    lines = [f"        {begin}(", *(f"            {one}," for one in plain)]
    for name, items in maps.items():
        lines += [f"            {name}={{", *(f"                {item}," for item in items), "            },"]
    return [*lines, "        )"]


def python(name: str) -> str:
    return name + "_" if keyword.iskeyword(name) else name


def optional(kind: str) -> str:
    return kind if kind.endswith("| None") else kind + " | None"


def answer_of(types: Types, operation: Any) -> tuple[str, str]:
    """Type of the answer, and the method that reads it."""
    for status in ("200", "202"):
        content = operation["responses"].get(status, {}).get("content", {})
        if "application/json" in content:
            schema = content["application/json"].get("schema")
            return types.expression(schema), "json"
        if "text/plain" in content:
            return "str", "text"
    return "None", "json"


def calls_of(document: Any) -> list[Call]:
    types = Types(document["components"]["schemas"])
    calls = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if operation["operationId"] in BY_HAND:
                continue
            parameters = operation.get("parameters", [])
            query = {
                one["name"]: types.expression(one["schema"])
                for one in parameters
                # The blocking form has an end; the other one is a method of the clients.
                if one["in"] == "query"
                and (operation["operationId"], one["name"]) != ("console_log", "follow")
            }
            body = {}
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content:
                schema = document["components"]["schemas"][content["schema"]["$ref"].rsplit("/", 1)[1]]
                for name, one in schema["properties"].items():
                    required = name in schema.get("required", [])
                    body[name] = (types.expression(one), required)
            positional = {
                one["name"]: types.expression(one["schema"]) for one in parameters if one["in"] == "path"
            }
            clash = set(positional) & (set(body) | set(query))
            if clash:
                raise SystemExit(f"{operation['operationId']}: {clash} are in the path and in the body")
            answer, reader = answer_of(types, operation)
            calls.append(
                Call(
                    snake(operation["operationId"]),
                    method.upper(),
                    path,
                    operation["summary"],
                    positional,
                    query,
                    body,
                    content is not None,
                    answer,
                    reader,
                )
            )
    return sorted(calls, key=lambda call: call.name)


CALLS_HEAD = """from abc import ABC, abstractmethod
from typing import Any

from .._path import quote
from .models import {names}

"""

BASE = '''
class {name}(ABC):
    """Calls of the API, {how}."""

    @abstractmethod
    {define} _json(self, method: str, path: str, *, query: Any = None, body: Any = None) -> Any: ...

    @abstractmethod
    {define} _text(self, method: str, path: str, *, query: Any = None) -> str: ...

'''


def calls(document: Any) -> str:
    found = calls_of(document)
    body = ""
    for name, how, define in [
        ("Calls", "which wait for their answers", "def"),
        ("AsyncCalls", "to be awaited", "async def"),
    ]:
        body += BASE.format(name=name, how=how, define=define)
        for call in found:
            body += "\n".join(call.lines(name.startswith("Async"))) + "\n"
    known = document["components"]["schemas"]
    used = sorted(name for name in known if re.search(rf"(?<![\w\"]){name}\b", body))
    imports = "(\n" + "".join(f"    {name},\n" for name in used) + ")"
    text = HEADER.format(what="Calls of the API.") + CALLS_HEAD.format(names=imports)
    return text + body.rstrip() + '\n\n\n__all__ = ["AsyncCalls", "Calls"]\n'


def files() -> dict[Path, str]:
    """Content of every generated file."""
    document = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    return {
        TARGET / "__init__.py": '"""Layer that generate.py writes."""\n',
        TARGET / "models.py": models(document),
        TARGET / "errors.py": errors(document),
        TARGET / "calls.py": calls(document),
    }


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: generate.py [--check]", file=sys.stderr)
        return 2
    stale = [
        path
        for path, text in files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if arguments:
        for path in stale:
            print(f"{path} is not what docs/openapi.json gives; run {__file__}", file=sys.stderr)
        return 1 if stale else 0
    TARGET.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

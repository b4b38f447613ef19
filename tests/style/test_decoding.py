"""Only `basaltmq.decoding` builds msgspec type information: two threads that build it at once crash the process."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MECHANISM = ROOT / "src/basaltmq/decoding.py"
MODULES = {"json", "msgpack", "toml", "yaml"}


def dotted(node: ast.expr) -> str:
    """Return the dotted name of an expression, such as `msgspec.json.decode`; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def faults(tree: ast.AST) -> list[str]:
    """Return every construction of msgspec's type information, with its line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "msgspec":
            names = {alias.name for alias in node.names} & {"convert", "decode", "Decoder", *MODULES}
            found += [f"line {node.lineno}: from {node.module} import {name}" for name in sorted(names)]
        elif isinstance(node, ast.Import):
            found += [
                f"line {node.lineno}: import {alias.name} as {alias.asname}"
                for alias in node.names
                if alias.name.split(".")[0] == "msgspec" and alias.asname
            ]
        elif isinstance(node, ast.Attribute):
            name = dotted(node)
            if name == "msgspec.convert" or (name.startswith("msgspec.") and name.endswith(".Decoder")):
                found.append(f"line {node.lineno}: {name}")
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            typed = any(keyword.arg == "type" for keyword in node.keywords)
            if name.startswith("msgspec.") and name.endswith(".decode") and typed:
                found.append(f"line {node.lineno}: {name} with a type")
    return found


def test_only_one_module_builds_type_information() -> None:
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in sorted((ROOT / "src").rglob("*.py"))
        if path != MECHANISM and (wrong := faults(ast.parse(path.read_text())))
    }
    assert not found, f"make a decoder at import with basaltmq.decoding: {found}"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("import msgspec\nmsgspec.convert(x, T)", 1),
        ("import msgspec\nf = msgspec.convert", 1),
        ("import msgspec\nmsgspec.json.decode(x, type=T)", 1),
        ("import msgspec\nmsgspec.msgpack.decode(x, type=T)", 1),
        ("import msgspec\nD = msgspec.json.Decoder(T)", 1),
        ("from msgspec import convert, Struct", 1),
        ("from msgspec import json", 1),
        ("from msgspec.json import decode, Decoder", 2),
        ("import msgspec as m", 1),
        ("import msgspec\nmsgspec.json.decode(x)\nmsgspec.json.encode(y)\nmsgspec.to_builtins(z)", 0),
        ("from msgspec import Struct, DecodeError", 0),
        ("x.decode(y, type=T)", 0),
    ],
)
def test_the_search_for_type_information_finds_it(code: str, count: int) -> None:
    assert len(faults(ast.parse(code))) == count


def test_the_search_finds_the_decoding_module() -> None:
    assert len(faults(ast.parse(MECHANISM.read_text()))) == 4

"""The modules of the source tree and their imports, read from the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

TABLES = {
    "basaltmq.cli.main": ("COMMANDS", "basaltmq.cli"),
    "basaltmq.cli.pipeline.command": ("OTHER_MODULES", "basaltmq.cli.pipeline"),
}
"""Modules that import others by name at run time: the table with the names, and their package."""


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module and package."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        names = list(path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def _table(tree: ast.Module, module: str) -> set[str]:
    name, package = TABLES[module]
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            assert node.value is not None
            entries = ast.literal_eval(node.value).values()
            return {f"{package}.{each if isinstance(each, str) else each[0]}" for each in entries}
    raise AssertionError(f"{module} has no table {name}")


def imports(module: str, known: dict[str, Path]) -> set[str]:
    """Return the Basalt modules that a module imports, including imports in functions and for types."""
    tree = ast.parse(known[module].read_text())
    found = _table(tree, module) if module in TABLES else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{module} has a relative import; write the whole name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found |= {whole if whole in known else node.module} & known.keys()
    return found - {module}


def import_time_graph() -> dict[str, set[str]]:
    """Return the Basalt modules that are executed when a module is imported: without imports in functions and for
    types."""
    known = modules()
    return {module: set(_run_by(ast.parse(path.read_text()).body, known)) - {module} for module, path in known.items()}


def _run_by(body: list[ast.stmt], known: dict[str, Path]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            wholes = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ({whole if whole in known else str(node.module) for whole in wholes} & known.keys())
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _run_by(node.body + node.orelse, known)
        elif isinstance(node, ast.Try):
            yield from _run_by(node.body, known)


def graph() -> dict[str, set[str]]:
    known = modules()
    return {module: imports(module, known) for module in known}

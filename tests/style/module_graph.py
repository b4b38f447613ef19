"""The modules of the source tree and their imports, read from the syntax tree."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

TABLES = {
    "basaltmq.cli.main": ("COMMANDS", "basaltmq.cli"),
    "basaltmq.cli.pipeline.command": ("OTHER_MODULES", "basaltmq.cli.pipeline"),
}
"""Modules that import others by name at run time: the table with the names, and the package they are in."""


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
    """The modules of ours that a module imports, also inside functions and for types."""
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


def graph() -> dict[str, set[str]]:
    known = modules()
    return {module: imports(module, known) for module in known}

"""Imports point downwards only, and packages of one layer do not import each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

LAYERS: list[set[str]] = [
    {"clock", "decoding", "durability", "errors", "http_client", "ids", "signals", "varints", "wire"},
    {"store", "log"},
    {"catalog", "queues", "streams"},
    {"broker", "embedded"},
    {"protocols", "admin", "client"},
    {"cli", "demo", "__main__", "__init__"},
]
# `__init__` is the public API: it may import everything. Modules below may import only the version from it.
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
PLANES_RANK = 2

# Both use the same planes. Common code belongs to the planes.
APART = {"broker", "embedded"}

# The pipeline does not use the broker: it imports planes and store, and only the command line imports it.
BESIDE = {"pipeline", "pyspark_basalt"}
TOOLS_RANK = RANK["cli"]


def part_of(module: str) -> str | None:
    """Return the layer of a module; None for other modules."""
    names = module.split(".")
    if names[0] == "pyspark_basalt":
        return names[0]
    if names[0] != "basaltmq":
        return None
    return names[1] if len(names) > 1 else "__init__"


def imported(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """Return every module that a file imports, as absolute names, including imports for types."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                kept = package[: len(package) - node.level + 1]
                base = ".".join([*kept, *([base] if base else [])])
            # `from basaltmq import store` names the part in the list.
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "basaltmq" else {base}
    return found


def wrong(importer: str, target: str) -> str | None:
    """Return why one layer may not import another; empty if it may."""
    if importer == target:
        return None
    if target in BESIDE:
        allowed = importer == "pyspark_basalt" or RANK.get(importer, -1) >= TOOLS_RANK
        return None if allowed else f"{importer} must not know {target}"
    if importer in BESIDE:
        return None if RANK[target] <= PLANES_RANK else f"{importer} uses planes and store, never {target}"
    if {importer, target} == APART:
        return f"{importer} and {target} are told apart; what both need belongs to a plane"
    return None if RANK[importer] >= RANK[target] else f"{importer} is below {target}"


def edges() -> dict[tuple[str, str], list[str]]:
    """Return (importer, imported) layers -> the files with such imports."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        names = list(path.relative_to(SOURCE).with_suffix("").parts)
        is_package = names[-1] == "__init__"
        module = ".".join(names[:-1] if is_package else names)
        importer = part_of(module)
        assert importer is not None, f"{path} is in no package of ours"
        for each in imported(ast.parse(path.read_text()), module, is_package):
            target = part_of(each)
            if target is not None and target != importer and not each.endswith("__version__"):
                found.setdefault((importer, target), []).append(str(path.relative_to(SOURCE)))
    return found


def test_every_package_has_a_layer() -> None:
    parts = {path.stem for path in (SOURCE / "basaltmq").iterdir() if path.suffix == ".py" or path.is_dir()}
    unplaced = parts - set(RANK) - BESIDE - {"__pycache__", "py"}
    assert not unplaced, f"give these a layer in {Path(__file__).name}: {sorted(unplaced)}"


def test_imports_point_downwards_only() -> None:
    faults = [
        f"{file}: {fault}"
        for (importer, target), files in edges().items()
        if (fault := wrong(importer, target)) is not None
        for file in files
    ]
    assert not faults, "\n".join(faults)


def test_packages_do_not_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for importer, target in edges():
        graph.setdefault(importer, set()).add(target)

    def reach(part: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph.get(part, ()))
        while todo:
            each = todo.pop()
            if each not in seen:
                seen.add(each)
                todo.extend(graph.get(each, ()))
        return seen

    circles = sorted(part for part in graph if part in reach(part))
    assert not circles, f"these import each other in a circle: {circles}"


@pytest.mark.parametrize(
    ("importer", "target", "allowed"),
    [
        ("store", "errors", True),
        ("errors", "store", False),
        ("store", "log", True),
        ("store", "queues", False),
        ("queues", "store", True),
        ("queues", "broker", False),
        ("embedded", "streams", True),
        ("streams", "embedded", False),
        ("broker", "embedded", False),
        ("embedded", "broker", False),
        ("__init__", "embedded", True),
        ("store", "__init__", False),
        ("broker", "protocols", False),
        ("cli", "protocols", True),
        ("admin", "cli", False),
        ("pipeline", "streams", True),
        ("pipeline", "broker", False),
        ("pyspark_basalt", "pipeline", True),
        ("pyspark_basalt", "protocols", False),
        ("streams", "pipeline", False),
        ("cli", "pipeline", True),
    ],
)
def test_the_layer_rule_detects_violations(importer: str, target: str, allowed: bool) -> None:
    assert (wrong(importer, target) is None) == allowed


@pytest.mark.parametrize(("service", "other"), [("fila", "basalt"), ("basalt", "fila")])
def test_the_grpc_services_do_not_import_each_other(service: str, other: str) -> None:
    """Common code of both services belongs to `protocols/grpc/services`."""
    services = "basaltmq.protocols.grpc.services"
    folder = SOURCE.joinpath(*services.split("."), service)
    files = sorted(folder.rglob("*.py"))
    assert files, f"{folder} is empty"
    for path in files:
        found = imported(ast.parse(path.read_text()), f"{services}.{service}.{path.stem}", is_package=False)
        assert not [each for each in found if each.startswith(f"{services}.{other}")], path


def test_all_forms_of_imports_are_found() -> None:
    code = "import basaltmq.a\nfrom basaltmq import b\nfrom basaltmq.c.d import e\nfrom .f import g\nfrom .. import h\n"
    found = imported(ast.parse(code), "basaltmq.store.rocks", is_package=False)
    assert found == {"basaltmq.a", "basaltmq.b", "basaltmq.c.d", "basaltmq.store.f", "basaltmq.h"}

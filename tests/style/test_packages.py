"""Packages: small folders, no cycles at any level, no module without a product path, and a map that is up to date."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import pytest
from tests.package_map import PAGE, page_with_map
from tests.style.module_graph import graph, import_time_graph, modules

MODULES_MAX = 20
"""Modules in one folder."""

ENTRIES = ("basaltmq", "basaltmq.cli.__main__", "basaltmq.client", "pyspark_basalt")
"""Modules that users import or run."""

WITHOUT_PRODUCT_PATH: dict[str, str] = {
    "basaltmq.catalog.preferences": "the console will use it",
}
"""Modules that no entry reaches, and why they exist. `catalog.reconcile` repairs their rows, so it does not count."""

REPAIR = "basaltmq.catalog.reconcile"

Graph = dict[str, set[str]]


@pytest.fixture(scope="module")
def imported() -> Graph:
    return graph()


def parents(module: str) -> list[str]:
    names = module.split(".")
    return [".".join(names[:size]) for size in range(1, len(names))]


def reached(imported: Graph, without: str) -> set[str]:
    seen: set[str] = set()
    todo = list(ENTRIES)
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += parents(module)
            todo += () if module == without else imported[module]
    return seen


def member_edges(imported: Graph) -> dict[str, dict[str, list[str]]]:
    """Member -> member of the same package it imports from -> the imports. Members are modules and sub-packages."""
    edges: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for importer, targets in imported.items():
        for target in targets:
            left, right = importer.split("."), target.split(".")
            same = next((at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
            if same is not None:
                one, other = ".".join(left[: same + 1]), ".".join(right[: same + 1])
                edges[one][other].append(f"{importer} imports {target}")
    return edges


def sibling_edges(imported: Graph) -> dict[str, dict[str, list[str]]]:
    """Like `member_edges`, of packages only."""
    packages = {parent for module in imported for parent in parents(module)}
    return {
        one: {other: found for other, found in others.items() if other in packages}
        for one, others in member_edges(imported).items()
        if one in packages
    }


def cycles(edges: Mapping[str, Iterable[str]]) -> list[str]:
    def reach(package: str) -> set[str]:
        seen: set[str] = set()
        todo = list(edges.get(package, ()))
        while todo:
            each = todo.pop()
            if each not in seen:
                seen.add(each)
                todo += edges.get(each, ())
        return seen

    return sorted(package for package in edges if package in reach(package))


def test_no_folder_has_more_than_20_modules() -> None:
    counts = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    assert not {str(folder): count for folder, count in counts.items() if count > MODULES_MAX}


def test_packages_do_not_import_each_other_in_a_cycle_at_any_level(imported: Graph) -> None:
    edges = sibling_edges(imported)
    found = cycles(edges)
    assert not found, {package: dict(edges[package]) for package in found}


def test_members_of_a_package_do_not_import_each_other_in_a_cycle() -> None:
    """So what a sub-package imports from its parent never imports the sub-package, not even through others.

    Imports for types and inside functions do not count.
    """
    edges = member_edges(import_time_graph())
    found = cycles(edges)
    assert not found, {member: dict(edges[member]) for member in found}


def test_no_module_imports_itself_through_others() -> None:
    """Imports for types and inside functions do not count."""
    assert not cycles(import_time_graph())


def test_a_cycle_is_found() -> None:
    fake = {
        "basaltmq.queues.ready.fair": {"basaltmq.queues.leases.table"},
        "basaltmq.queues.leases.table": {"basaltmq.queues.throttle.gate"},
        "basaltmq.queues.throttle.gate": {"basaltmq.queues.ready.plain"},
        "basaltmq.queues.ready.plain": set(),
    }
    packages = ["basaltmq.queues.leases", "basaltmq.queues.ready", "basaltmq.queues.throttle"]
    assert cycles(sibling_edges(fake)) == packages


def test_a_cycle_between_a_package_and_its_sub_package_is_found() -> None:
    fake = {
        "basaltmq.queues.plane": {"basaltmq.queues.leases.table"},
        "basaltmq.queues.leases.table": {"basaltmq.queues.queue"},
        "basaltmq.queues.queue": {"basaltmq.queues.leases.delivery"},
        "basaltmq.queues.leases.delivery": set(),
    }
    assert cycles(member_edges(fake)) == ["basaltmq.queues.leases", "basaltmq.queues.queue"]


def test_every_module_has_a_product_path(imported: Graph) -> None:
    missing = set(imported) - reached(imported, without=REPAIR)
    assert missing == set(WITHOUT_PRODUCT_PATH), "correct the module or the list of exceptions"


def test_the_map_of_packages_is_up_to_date() -> None:
    assert PAGE.read_text() == page_with_map(), "run `make package-map`"

"""Write docs/SPEC-COVERAGE.md: which test proves which line of the specification, from the marks on the tests.

The marks are read from the source. The page shows the marks only; the test run shows whether the tests pass.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "SPEC-COVERAGE.md"
MARKS: Final = ("spec", "promise")

SPEC: Final = ROOT / "docs" / "SPEC.md"
_ID: Final = re.compile(r"^- ([A-Z]\d+) (.+)$", re.MULTILINE)

USER_FACING: Final = (
    "tests/interop/",
    "tests/soak/",
    "tests/unit/cli/",
    "tests/unit/client/",
    "tests/unit/embedded/",
    "tests/unit/pipeline/",
    "tests/unit/pyspark_basalt/",
)
"""Folders whose tests use an interface that users can reach: a server process, a client, the command line, Spark."""

PUBLIC_IMPORTS: Final = ("basaltmq", "basaltmq.embedded", "basaltmq.cli", "basaltmq.client", "tests.interop")
"""A test elsewhere is user-facing too when its module uses one of these."""


def read_ids(spec: Path = SPEC) -> dict[str, str]:
    """Id -> the first line of its text."""
    return dict(_ID.findall(spec.read_text()))


IDS: Final = read_ids()


class UnknownIdError(Exception):
    """A test is marked with an id the specification does not have."""


def marks_of(expression: ast.expr, marks: tuple[str, ...] = MARKS) -> Iterator[str]:
    """The ids in `pytest.mark.spec(...)`, `pytest.mark.promise(...)`, alone or in a list."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in marks:
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def marked_tests(tree: ast.Module, marks: tuple[str, ...] = MARKS) -> Iterator[tuple[str, set[str]]]:
    """Every test of a module with its ids, including those of its module and class."""
    for_all = {
        each
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _names_pytestmark(node)
        for each in marks_of(node.value, marks)
    }
    yield from _tests_in(tree.body, for_all, marks)


def _names_pytestmark(node: ast.Assign | ast.AnnAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets)


def _tests_in(body: list[ast.stmt], inherited: set[str], marks: tuple[str, ...]) -> Iterator[tuple[str, set[str]]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            own = inherited | {each for decorator in node.decorator_list for each in marks_of(decorator, marks)}
            if isinstance(node, ast.ClassDef):
                yield from _tests_in(node.body, own, marks)
            elif node.name.startswith("test_"):
                yield node.name, own
        elif isinstance(node, ast.Assign):
            # A state machine's test case gets its marks where it gets its name.
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id.startswith("Test"):
                    yield target.id, inherited | set(marks_of(node.value, marks))


class Proof(NamedTuple):
    file: str
    test: str
    is_user_facing: bool


def is_user_facing(name: str, tree: ast.Module) -> bool:
    """Whether the tests of a module go through an interface that users can reach."""
    if name.startswith(USER_FACING):
        return True
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imported.add(node.module)
    return any(
        each == public or (public != "basaltmq" and each.startswith(public + "."))
        for each in imported
        for public in PUBLIC_IMPORTS
    )


def collect(tests: Path) -> dict[str, list[Proof]]:
    """Id -> the tests that prove it."""
    proofs: dict[str, list[Proof]] = {each: [] for each in IDS}
    for path in sorted(tests.rglob("test_*.py")):
        name = path.relative_to(tests.parent).as_posix()
        tree = ast.parse(path.read_text())
        user_facing = is_user_facing(name, tree)
        for test, ids in marked_tests(tree):
            for each in ids:
                if each not in proofs:
                    raise UnknownIdError(f"{name}::{test} is marked with {each!r}, which is not in the specification")
                proofs[each].append(Proof(name, test, user_facing))
    return proofs


def page(proofs: dict[str, list[Proof]]) -> str:
    rows = [_row(each, proofs[each]) for each in IDS]
    covered = sum("| covered |" in row for row in rows)
    lines = [
        "# Specification coverage",
        "",
        "Generated by `make coverage-page` from the marks on the tests. Do not edit.",
        "",
        "- *covered*: a test proves it through an interface that users can reach. The table names one such test.",
        "- *internal*: only tests of internal modules prove it.",
        "- *open*: no test is marked with the id.",
        "",
        f"{covered} of {len(IDS)} ids are covered. [SPEC.md](SPEC.md) has the text of each id.",
        "",
        "| id | status | tests | test |",
        "| --- | --- | --- | --- |",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def _row(each: str, proofs: list[Proof]) -> str:
    if not proofs:
        return f"| {each} | open | 0 | |"
    shown = min(proofs, key=lambda proof: (not proof.is_user_facing, proof.file, proof.test))
    status = "covered" if shown.is_user_facing else "internal"
    return f"| {each} | {status} | {len(set(proofs))} | `{shown.file}::{shown.test}` |"


def main() -> int:
    text = page(collect(ROOT / "tests"))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    print(f"wrote {PAGE.relative_to(ROOT)}: {text.splitlines()[8]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

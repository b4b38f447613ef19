"""docs/SPEC-COVERAGE.md: which tests prove which line of the specification, from the marks on the tests.

`python -m tests.coverage_page` writes it. The marks are read from the source, not by running anything, so the page
says what the tests claim; that they pass is the test run's to say. Ids without a test are listed as open.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "SPEC-COVERAGE.md"
MARKS: Final = ("spec", "promise")

GROUPS: Final = {
    "A": "Store",
    "B": "Streams",
    "C": "Queues",
    "D": "Scale of metadata",
    "E": "Queue process and persistence",
    "F": "Data pipeline",
    "P": "Promises",
}

IDS: Final = {
    "A1": "One RocksDB database, isolated by families listed in one enum",
    "A2": "Configuration store with hierarchy",
    "A3": "Preference store",
    "A4": "Message store: metadata, chunked content, queue entries, id blocks",
    "A5": "Store transactions in one batch, async commit",
    "A6": "Distributed (XA) transactions",
    "A7": "Readers that a handler can stop",
    "A8": "Link store (AMQP 1.0) with version and upgrade",
    "A9": "Versions and upgrades for every store",
    "A10": "Management: options, flush, compact, properties, statistics, checkpoint, verify",
    "A11": "Overfull and underfull with hysteresis",
    "A12": "Recovery order; unknown entries quarantined",
    "B1": "The shard as unit of storage",
    "B2": "The storage adapter",
    "B3": "Engines memory, rocksdb, segment under one suite",
    "B4": "Driver manager routes by topic",
    "B5": "Segment engine: rolling, states, indexes",
    "B6": "One offset model, atomic and never reused",
    "B7": "Offsets of groups, cached and persistent",
    "B8": "Creating a topic is one step with a clean undo",
    "B9": "Leader forwarding",
    "B10": "Retention, expiry, key compaction",
    "C1": "The Storage interface",
    "C2": "Families and keys of queues",
    "C3": "UUIDv7 ids, ordered within the millisecond",
    "C4": "Message and queue configuration",
    "C5": "Typed errors with code and retriable",
    "C6": "Every multi-key change is one batch, proved by injected failures",
    "C7": "Fenced leases",
    "C8": "One failure path for nack and expiry",
    "C9": "Dead-letter queue and redrive",
    "C10": "Fairness by deficit round robin",
    "C11": "Throttling by token buckets",
    "C12": "Lua hooks in a sandbox",
    "C13": "Deleting a queue removes all its data",
    "C14": "Runtime configuration never shows secrets",
    "D1": "A million topics at a flat cost",
    "D2": "Consume-queue index in RocksDB",
    "D3": "Index without WAL, rebuilt exactly",
    "D4": "Index entries cleaned, deleted topics stay gone",
    "D5": "Switching storage modes; migration and export",
    "E1": "Backing-queue interface with proxies",
    "E2": "Paging with bounded memory",
    "E3": "Small messages embedded, large ones referenced",
    "E4": "Stored once with exact reference counts",
    "E5": "Space reclaimed at half garbage",
    "E6": "Confirms after durability by group commit",
    "E7": "TTL, limits, dead-lettering, expiry, priorities",
    "E8": "Consumers: prefetch, priority, exclusive, single active",
    "E9": "Isolated, supervised virtual hosts",
    "E10": "Recovery cost follows what changed",
    "E11": "Peek and browse",
    "F1": "Spark data source `basalt`",
    "F2": "Pipeline jobs",
    "F3": "Exactly-once between stream and archive",
    "P1": "Confirmed means durable",
    "P2": "One operation, one batch",
    "P3": "Order of queues and streams",
    "P4": "Leases are fenced",
    "P5": "Expiry is a failure like a nack",
    "P6": "What is derived is rebuilt identical",
    "P7": "Corruption is contained and reported",
    "P8": "Memory is bounded",
    "P9": "Start-up cost follows what changed",
    "P10": "Deleted is gone",
    "P11": "One vhost's failure stays its own",
    "P12": "Delivery comes first",
    "P13": "No client delays another by more than 100 ms",
    "P14": "No one is administrator by default",
    "P15": "Ownership is fenced",
}


class UnknownIdError(Exception):
    """A test is marked with an id the specification does not have."""


def marks_of(expression: ast.expr) -> Iterator[str]:
    """The ids in `pytest.mark.spec(...)`, `pytest.mark.promise(...)`, alone or in a list."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MARKS:
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def marked_tests(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Every test of a module with the ids it proves, those of its module and class included."""
    for_all = {
        each
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _names_pytestmark(node)
        for each in marks_of(node.value)
    }
    yield from _tests_in(tree.body, for_all)


def _names_pytestmark(node: ast.Assign | ast.AnnAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets)


def _tests_in(body: list[ast.stmt], inherited: set[str]) -> Iterator[tuple[str, set[str]]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            own = inherited | {each for decorator in node.decorator_list for each in marks_of(decorator)}
            if isinstance(node, ast.ClassDef):
                yield from _tests_in(node.body, own)
            elif node.name.startswith("test_"):
                yield node.name, own
        elif isinstance(node, ast.Assign):
            # A state machine's test case gets its marks where it gets its name.
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id.startswith("Test"):
                    yield target.id, inherited | set(marks_of(node.value))


def collect(tests: Path) -> dict[str, list[tuple[str, str]]]:
    """Id -> the (file, test) that prove it."""
    proofs: dict[str, list[tuple[str, str]]] = {each: [] for each in IDS}
    for path in sorted(tests.rglob("test_*.py")):
        name = path.relative_to(tests.parent).as_posix()
        for test, ids in marked_tests(ast.parse(path.read_text())):
            for each in ids:
                if each not in proofs:
                    raise UnknownIdError(f"{name}::{test} is marked with {each!r}, which is not in the specification")
                proofs[each].append((name, test))
    return proofs


def page(proofs: dict[str, list[tuple[str, str]]]) -> str:
    still_open = [each for each in IDS if not proofs[each]]
    lines = [
        "# What the tests prove",
        "",
        "Written by `make coverage-page` from the marks on the tests; do not edit. A test listed here claims to prove",
        "the line; that one test is there does not mean that all of the line is proved.",
        "",
        f"{len(IDS) - len(still_open)} of {len(IDS)} ids have a test.",
        "",
    ]
    for letter, title in GROUPS.items():
        lines += [f"## {letter}. {title}", ""]
        for each in IDS:
            if each.rstrip("0123456789") == letter:
                lines += _section(each, proofs[each])
    lines += ["## Open", "", "No test is marked with these:", ""]
    lines += [f"- {each} {IDS[each]}" for each in still_open] or ["- none"]
    return "\n".join(lines) + "\n"


def _section(each: str, proofs: list[tuple[str, str]]) -> list[str]:
    lines = [f"### {each} {IDS[each]}", ""]
    by_file: dict[str, list[str]] = {}
    for file, test in sorted(set(proofs)):
        by_file.setdefault(file, []).append(test.removeprefix("test_").replace("_", " "))
    for file, tests in by_file.items():
        lines += [f"- `{file}`", *(f"  - {test}" for test in tests)]
    return [*lines, "" if by_file else "*Open: no test.*", *([] if by_file else [""])]


def main() -> int:
    text = page(collect(ROOT / "tests"))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    print(f"wrote {PAGE.relative_to(ROOT)}: {text.splitlines()[5]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

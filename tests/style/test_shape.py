"""The shape of the source tree: sizes, names, docstrings, and forbidden words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES_MAX = 600
"""Maximum lines of a file. Split a longer one."""

STILL_TOO_LONG = {
    "tests/conformance/test_streams.py": 629,
}
"""Files over the limit that must be split. They may shrink but not grow. Remove them from this list when they fit."""

CATCH_ALLS = {"utils", "util", "helpers", "helper", "common", "misc"}

# Written in parts, so that the search does not find this file.
FORBIDDEN = [
    "pypi" + ".org",
    "pythonhosted" + ".org",
    "repo1" + ".maven",
    "repo.maven" + ".apache",
    "registry" + ".npmjs",
    "/wo" + "rk/",
    "/ro" + "ot/",
]
TEXTS = {".py", ".md", ".toml", ".txt", ".cfg", ".ini", ".yml", ".yaml", ".sh", ".json", ".pyi", ""}
FOLDERS = ["src", "tests", "bench", "docs", "examples", "requirements", ".ci"]


def python_files(*folders: str) -> list[Path]:
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def text_files() -> list[Path]:
    found = [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted(path for path in found if path.suffix in TEXTS and ".egg-info" not in str(path))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_file_is_too_long() -> None:
    lengths = {shown(path): len(path.read_text().splitlines()) for path in python_files("src", "tests", "bench")}
    over = {name: lines for name, lines in lengths.items() if lines > STILL_TOO_LONG.get(name, LINES_MAX)}
    assert not over, f"split these files: {over}"
    done = [name for name in STILL_TOO_LONG if lengths.get(name, 0) <= LINES_MAX]
    assert not done, f"these fit; take them off the list: {done}"


def test_no_module_is_a_catch_all() -> None:
    names = [path for path in python_files("src", "tests", "bench") if CATCH_ALLS & {path.stem, *path.parts}]
    assert not [shown(path) for path in names]


def test_every_module_has_a_docstring() -> None:
    silent = [
        shown(path)
        for path in python_files("src", "tests", "bench")
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent, f"a module docstring is missing in {silent}"


def test_no_registry_or_local_path_is_named() -> None:
    faults = []
    for path in text_files():
        text = path.read_text(errors="ignore")
        faults += [f"{shown(path)} names {word!r}" for word in FORBIDDEN if word in text]
    assert not faults, "\n".join(faults)


def holds_a_test(tree: ast.AST) -> bool:
    """Whether there is a test function, or a `Test...` name for a state machine's test case."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            return True
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id.startswith("Test") for t in node.targets
        ):
            return True
    return False


def test_every_test_file_holds_a_test() -> None:
    empty = [
        shown(path)
        for path in python_files("tests")
        if path.name.startswith("test_") and not holds_a_test(ast.parse(path.read_text()))
    ]
    assert not empty


@pytest.mark.parametrize(
    ("code", "holds"),
    [
        ("x = 1", False),
        ("def test_a(): ...", True),
        ("def helper(): ...", False),
        ("TestIt = Machine.TestCase", True),
        ("Tester.x = 1", False),
    ],
)
def test_the_search_for_tests_finds_them(code: str, holds: bool) -> None:
    assert holds_a_test(ast.parse(code)) is holds


def test_the_search_reaches_the_files_that_matter() -> None:
    searched = {shown(path) for path in text_files()}
    assert {"Makefile", "pyproject.toml", "requirements/base.txt", "src/basaltmq/errors.py"} <= searched
    assert shown(Path(__file__)) in searched

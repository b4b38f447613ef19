"""Source files that the documentation names exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASES = (ROOT, ROOT / "src", ROOT / "src" / "basaltmq")
NAMED = re.compile(r"`([a-z0-9_]+(?:/[a-z0-9_]+)*\.py)`")


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def missing(text: str) -> Iterator[str]:
    """Paths with a folder. A bare file name refers to a folder in the text around it."""
    for path in NAMED.findall(text):
        if "/" in path and not any((base / path).is_file() for base in BASES):
            yield path


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_source_files_named_in_the_documentation_exist(page: Path) -> None:
    assert not list(missing(page.read_text())), "correct the path in the page"


def test_a_wrong_path_is_found() -> None:
    assert list(missing("`store/api.py`, `store/apis.py`, `mend.py`, `src/basaltmq/ids.py`")) == ["store/apis.py"]

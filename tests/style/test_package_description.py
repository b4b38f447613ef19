"""The description for a package index: every link and picture of the README has an absolute target."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_description_has_no_relative_links() -> None:
    description: str = runpy.run_path(str(ROOT / "setup.py"))["description"]()
    targets = re.findall(r"\]\(([^)]+)\)", description)
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


def test_links_of_the_description_name_files_of_the_repository() -> None:
    found = runpy.run_path(str(ROOT / "setup.py"))
    targets = re.findall(r"\]\((https://[^)]+)\)", found["description"]())
    paths = [target.removeprefix(found["SOURCE_URL"]).removesuffix("?raw=true") for target in targets]
    assert [path for path in paths if not (ROOT / path).is_file()] == []

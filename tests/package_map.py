"""Writes the map of packages in docs/ARCHITECTURE.md: one line per package, from its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
BEGIN = "<!-- map of packages: written by `make package-map` -->\n"
END = "<!-- end of the map -->\n"


def lines() -> list[str]:
    """Return one line per package: its path, and the first line of its docstring."""
    found = []
    for path in sorted((ROOT / "src").rglob("__init__.py"), key=lambda each: each.parts[:-1]):
        names = path.parent.relative_to(ROOT / "src").parts
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert text, f"{path} has no docstring"
        found.append(f"| `{'/'.join(names)}` | {text.splitlines()[0]} |\n")
    return found


def page_with_map() -> str:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "".join([before, BEGIN, "| package | content |\n| --- | --- |\n", *lines(), END, after])


if __name__ == "__main__":
    PAGE.write_text(page_with_map())

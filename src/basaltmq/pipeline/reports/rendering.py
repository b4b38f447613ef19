"""Renders the Jinja2 templates of the reports. Every value is escaped, because names come from clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from basaltmq.errors import EnvironmentMissingError, install_hint
from basaltmq.pipeline.reports import plots
from basaltmq.pipeline.reports.figures import exact, size, size_range, text

if TYPE_CHECKING:
    from jinja2 import Environment

DATE_CHARACTERS = 5
"""The year, which the labels of a time axis omit: 2026-."""


def render(template: str, **values: Any) -> str:
    """Return a template of this package with its values filled in."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise EnvironmentMissingError(f"HTML reports need jinja2: {install_hint('spark')}") from None

    def drawn(make: Any) -> Any:
        def draw(*arguments: Any) -> Markup:
            plot = make(*arguments)
            # The template has escaped its values.
            return Markup("") if plot is None else Markup(render("plot.svg.j2", plot=plot))  # noqa: S704

        return draw

    environment = Environment(
        loader=PackageLoader("basaltmq.pipeline.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "column": _column,
        "earliest": lambda items, name: min(filter(None, _column(items, name)), default=None),
        "exact": exact,
        "latest": lambda items, name: max(filter(None, _column(items, name)), default=None),
        "numeric_columns": _numeric_columns,
        "px": lambda value: f"{value:.2f}".rstrip("0").rstrip("."),
        "rows": lambda items: [msgspec.to_builtins(each) for each in items],
        "size": size,
        "size_range": size_range,
        "sum": lambda items, name: sum(_column(items, name, 0)),
        "text": text,
        "times": lambda items, name: [each[DATE_CHARACTERS:] for each in _column(items, name)],
    }
    environment.globals |= {"bars": drawn(plots.bars), "horizontal_bars": drawn(plots.horizontal_bars)}
    return environment


def _column(items: Iterable[Any], name: str, default: Any = None) -> list[Any]:
    """Return one attribute or key of every item, with `default` instead of None."""
    values = (each[name] if isinstance(each, dict) else getattr(each, name) for each in items)
    return [default if each is None else each for each in values]


def _numeric_columns(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    return {name for name in rows[0] if all(_is_number(row.get(name)) for row in rows)}


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))

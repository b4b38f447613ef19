"""Output of the commands: tables, JSON, errors in one line, and progress.

Tables go to stdout as plain text with numbers aligned right. Progress goes to stderr, and only if stderr is a terminal.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

import click
import msgspec

from basaltmq.errors import BasaltError, NotAStoreError, StoreLockedError
from basaltmq.pipeline.store_path import NAME_FILE, VHOSTS

PROGRESS_INTERVAL_S: Final = 0.2
"""Minimum time between two updates of a progress line."""

FINDINGS: Final = 2
"""Exit code of a command that found damage, losses, blocked publishers or skipped objects."""

Row = Mapping[str, Any]
Column: TypeAlias = str | Callable[[Row], object]
"""A field of an object, or a function of the object."""


class BasaltGroup(click.Group):
    """A command group that shows Basalt's errors in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BasaltError as error:
            raise CommandError(error, hint=_hint(error, ctx.obj)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:
                # The reader closed the pipe (`| head`). Click then exits without a message.
                raise
            raise SystemFault(error) from error


class CommandError(click.ClickException):
    def __init__(self, error: BasaltError, hint: str = "") -> None:
        super().__init__(str(error))
        self._error = error
        self._hint = hint

    def show(self, file: IO[Any] | None = None) -> None:
        hint = self._hint or ("; a retry may succeed" if self._error.retriable else "")
        click.echo(f"error [{self._error.code}]: {self.message}{hint}", err=True)


class SystemFault(click.ClickException):
    """An error of the operating system outside of a store, such as a full disk under the output file."""

    def __init__(self, error: OSError) -> None:
        what = error.filename or "cannot read the input or write the output"
        super().__init__(f"{what}: {error.strerror or error}")

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error [system]: {self.message}", err=True)


def _hint(error: BasaltError, data_dir: object) -> str:
    """Suggest --server when the directory belongs to a broker."""
    if isinstance(error, NotAStoreError) and isinstance(data_dir, Path) and (data_dir / VHOSTS).is_dir():
        return (
            "; this is a broker's directory: use --server, or --data-dir "
            f"{data_dir}/{VHOSTS}/HASH/store while it is stopped"
        )
    if isinstance(error, StoreLockedError) and isinstance(data_dir, Path) and (data_dir.parent / NAME_FILE).exists():
        return "; this is a broker's directory: use --server"
    return ""


def show(rows: Sequence[Row], *, as_json: bool, empty: str = "no results") -> None:
    """Print rows that have the same columns."""
    if as_json:
        show_object(list(rows))
        return
    if not rows:
        click.echo(empty)
        return
    click.echo(table(rows))


def show_objects(
    objects: Sequence[Row], columns: Mapping[str, Column], *, as_json: bool, empty: str = "no results"
) -> None:
    """Print objects completely as JSON, or as a table with these columns."""
    if not as_json:
        objects = [
            {title: column(each) if callable(column) else each.get(column) for title, column in columns.items()}
            for each in objects
        ]
    show(objects, as_json=as_json, empty=empty)


def titled(*fields: str) -> dict[str, str]:
    """Return columns whose titles are the names of their fields."""
    return {field.replace("_", " "): field for field in fields}


def compact_json(value: object) -> str:
    """Return a cell with JSON; empty for an empty value."""
    return msgspec.json.encode(value).decode() if value else ""


def show_object(value: object) -> None:
    """Print one object as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode())


def table(rows: Sequence[Row]) -> str:
    columns = list(rows[0])
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[at]) for line in cells)) for at, column in enumerate(columns)]
    right = [all(_is_number(row[column]) for row in rows) for column in columns]
    lines = [_line(columns, widths, right), "  ".join("-" * width for width in widths)]
    lines += [_line(line, widths, right) for line in cells]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    placed = [
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(cells, widths, right, strict=True)
    ]
    return "  ".join(placed).rstrip()


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return str(value)


def progress_line(what: str, unit: str = "bytes") -> Callable[[int, int], None]:
    """Return a `progress(done, total)` function. On a terminal it draws a line with the rate and the remaining time."""
    if not sys.stderr.isatty():
        return lambda _done, _total: None
    began = time.monotonic()
    drawn = 0.0

    def draw(done: int, total: int) -> None:
        nonlocal drawn
        now = time.monotonic()
        if done < total and now - drawn < PROGRESS_INTERVAL_S:
            return
        drawn = now
        rate = done / max(now - began, 1e-9)
        left_s = (total - done) / rate if rate else 0.0
        share = done / total if total else 1.0
        end = "\n" if done >= total else ""
        click.echo(f"\r{what}: {share:6.1%}  {rate:,.0f} {unit}/s  {left_s:,.0f} s left ", nl=False, err=True)
        click.echo(end, nl=False, err=True)

    return draw

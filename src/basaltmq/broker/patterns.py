"""Regular expressions that administrators write and the broker's loop evaluates: those that could hold it are refused.

Python's engine tries alternatives one after the other, so a pattern such as `(a+)+$` takes longer than anybody waits on
a name of forty letters, and names come from clients. What makes that possible is a repeat without an upper limit
inside another one, or a repeated choice whose alternatives can begin alike; a chain of many such repeats is slow by a
power of the name's length. Such patterns are never needed for names: the error says what to write instead. Lookaheads,
which RabbitMQ's users know as `^(?!amq\\.).*`, stay possible.

    refused: (a+)+   (\\w*x?)*   (a|ab)*   .*.*.*.*     taken: ^orders\\.   .*   ^(?!amq\\.).*   (eu|us)-.*   (a|b)*

A choice between any number of alternatives that repeat once each, `^a.*|^b.*|^c.*`, is gone through one by one: taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from basaltmq.errors import InvalidArgumentError

PATTERN_BYTES_MAX: Final = 1024
"""Longer ones are lists in disguise."""

OPEN_REPEATS_MAX: Final = 3
"""Repeats without a limit in one pattern. A name has 255 bytes and a search begins at each: 10^8 steps at worst."""

REPEAT_OPEN_MIN: Final = 16
"""A repeat of up to this often counts as one without a limit."""

# The parser of the standard library; it has had this name and this shape since 3.11.
_parser: Final[Any] = re._parser  # type: ignore[attr-defined]
_constants: Final[Any] = re._constants  # type: ignore[attr-defined]


def compiled(pattern: str, what: str) -> re.Pattern[str]:
    """The pattern, ready for use; `what` names it in the error if it cannot be."""
    if not isinstance(pattern, str) or len(pattern.encode(errors="replace")) > PATTERN_BYTES_MAX:
        raise InvalidArgumentError(f"{what} is text of up to {PATTERN_BYTES_MAX} bytes")
    try:
        found = re.compile(pattern)
        parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidArgumentError(f"{what}, {pattern!r:.80}, is no regular expression: {error}") from None
    repeats = _open_repeats(parsed, pattern, what, inside=False)
    if repeats > OPEN_REPEATS_MAX and not _is_choice(parsed, pattern, what):
        raise InvalidArgumentError(
            f"{what}, {pattern!r:.80}, repeats without a limit {repeats} times, more than {OPEN_REPEATS_MAX}: matching "
            "a long name would take too long; join some, or give them limits such as {1,8}"
        )
    return found


def _open_repeats(items: Iterable[Any], pattern: str, what: str, *, inside: bool) -> int:
    """How many repeats without a limit there are; raises if one is inside another."""
    count = 0
    for operator, argument in items:
        name = str(operator)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, body = argument
            is_open = most is _constants.MAXREPEAT or most > REPEAT_OPEN_MIN
            if is_open and (inside or _is_ambiguous(body)):
                raise InvalidArgumentError(
                    f"{what}, {pattern!r:.80}, repeats something that repeats, or that can be read in two ways: "
                    "matching a long name could take for ever; write it with one repeat, such as [a-z]+ for ([a-z]+)+"
                )
            count += is_open + _open_repeats(body, pattern, what, inside=inside or is_open)
        else:
            count += sum(_open_repeats(part, pattern, what, inside=inside) for part in _parts(argument))
    return count


def _is_choice(items: Iterable[Any], pattern: str, what: str) -> bool:
    """Whether all that repeats is in one choice whose alternatives repeat once each."""
    repeating = [each for each in items if _open_repeats([each], pattern, what, inside=False)]
    if len(repeating) != 1:
        return False
    operator, argument = repeating[0]
    if str(operator) == "SUBPATTERN":
        return _is_choice(argument[-1], pattern, what)
    if str(operator) != "BRANCH":
        return False
    return all(_open_repeats(each, pattern, what, inside=False) <= 1 for each in argument[1])


def _parts(argument: Any) -> list[Any]:
    """The patterns within an operator's argument."""
    if isinstance(argument, _parser.SubPattern):
        return [argument]
    if isinstance(argument, tuple | list):
        return [part for each in argument for part in _parts(each)]
    return []


def _is_ambiguous(body: Any) -> bool:
    """Whether what is repeated is a choice whose alternatives can begin alike, or may be left out."""
    for operator, argument in body:
        name = str(operator)
        if name == "BRANCH":
            firsts = [_first(each) for each in argument[1]]
            if None in firsts or len(set(firsts)) < len(firsts):
                return True
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and argument[0] != argument[1]:
            return True
        if any(_is_ambiguous(part) for part in _parts(argument)):
            return True
    return False


def _first(alternative: Any) -> int | None:
    """The character an alternative begins with, if it is one."""
    items = list(alternative)
    if items and str(items[0][0]) == "LITERAL":
        return int(items[0][1])
    return None

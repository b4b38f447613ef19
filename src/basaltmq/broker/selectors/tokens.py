"""Words of a selector: names, keywords, numbers, strings and operators.

A name with other characters than letters, digits, `_`, `$` and `.` needs double quotes: `a-b` is a difference.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from basaltmq.errors import InvalidArgumentError

NAME, KEYWORD, NUMBER, TEXT, OPERATOR, END = range(6)

KEYWORDS: Final = frozenset(
    ("AND", "OR", "NOT", "BETWEEN", "IN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "FALSE"),
)
"""Keywords, in upper or lower case."""

_WORD: Final = re.compile(
    r"""
    (?P<space>\s+)
    | (?P<real>(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?[fFdD]?|\d+[eE][+-]?\d+[fFdD]?|\d+[fFdD])
    | (?P<hex>0[xX][0-9a-fA-F]+[lL]?)
    | (?P<whole>\d+[lL]?)
    | (?P<text>'(?:[^']|'')*')
    | (?P<quoted>"(?:[^"]|"")+")
    | (?P<name>[^\W\d][\w.$]*|[$_][\w.$]*)
    | (?P<operator><>|<=|>=|!=|[=<>+\-*/(),])
    """,
    re.VERBOSE,
)
_NUMBER_CHARS_MAX: Final = 64


class Word(NamedTuple):
    """A word and its position. Keywords are in upper case, numbers and strings decoded."""

    kind: int
    value: Any
    at: int


def words_of(text: str) -> list[Word]:
    """Split a selector into words. The last one has the kind END."""
    found: list[Word] = []
    at = 0
    while at < len(text):
        match = _WORD.match(text, at)
        if match is None:
            raise invalid(f"unexpected character {text[at]!r}", at)
        word, kind = match.group(), match.lastgroup
        if kind == "name":
            is_keyword = word.upper() in KEYWORDS
            found.append(Word(KEYWORD, word.upper(), at) if is_keyword else Word(NAME, word, at))
        elif kind == "text":
            found.append(Word(TEXT, word[1:-1].replace("''", "'"), at))
        elif kind == "quoted":
            found.append(Word(NAME, word[1:-1].replace('""', '"'), at))
        elif kind == "operator":
            found.append(Word(OPERATOR, "<>" if word == "!=" else word, at))
        elif kind != "space":
            found.append(Word(NUMBER, _number(word, str(kind), at), at))
        at += len(word)
    found.append(Word(END, "", at))
    return found


def _number(word: str, kind: str, at: int) -> int | float:
    if len(word) > _NUMBER_CHARS_MAX:
        raise invalid("a number is too long", at)
    if kind == "real":
        return float(word.rstrip("fFdD"))
    digits = word.rstrip("lL")
    return int(digits, 16) if kind == "hex" else int(digits)


def invalid(what: str, at: int) -> InvalidArgumentError:
    """Return the error for a selector that is not valid."""
    return InvalidArgumentError(f"invalid selector: {what} at character {at + 1}")

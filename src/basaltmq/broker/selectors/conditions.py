"""Conditions of a selector, as functions that return True, False, or None for unknown.

    NOT   unknown -> unknown     AND   false if either is false, else unknown if either is     OR   the reverse

A comparison with a missing property is unknown. Values of different types are not equal, and neither is less. Strings
and booleans can only be equal or unequal. Arithmetic is unknown if an operand is not a number or the divisor is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import re2

LookUp: TypeAlias = Callable[[str], Any]
"""Returns the value of an identifier: a bool, a number, a string, `Untyped`, or None if the message does not have
it."""

Condition: TypeAlias = Callable[[LookUp], Any]

NUMBERS: Final = (int, float)
NUMBER_MAX: Final = 1e300
"""Results above it are unknown, so that products of whole numbers do not grow without bound."""

LIKE_BYTES_MAX: Final = 1024
"""Limit of all LIKE patterns of a selector."""

LIKE_STEPS_MAX: Final = 1 << 17
"""Bytes of all LIKE patterns times bytes of a value. RE2 takes up to 4 ns per step, so a message takes 0.5 ms. With a
longer value the result is unknown."""

_PROGRAM_BYTES_MAX: Final = 128 << 10


class Untyped(str):
    """A property of a protocol that has strings only. It counts as a number or a boolean if the other operand is
    one."""

    __slots__ = ()

    def number(self) -> int | float | None:
        for kind in (int, float):
            try:
                found: int | float = kind(self)
            except ValueError:
                continue
            return found if abs(found) <= NUMBER_MAX else None
        return None


def _numeric(value: Any) -> Any:
    return value.number() if isinstance(value, Untyped) else value


def _as_other(value: Any, other: Any) -> Any:
    """Return an untyped value with the type of the other operand."""
    if not isinstance(value, Untyped) or isinstance(other, str):
        return value
    if isinstance(other, bool):
        return {"true": True, "false": False}.get(value.lower(), value)
    number = value.number()
    return value if number is None else number


def constant(value: Any) -> Condition:
    return lambda look_up: value


def named(name: str) -> Condition:
    return lambda look_up: look_up(name)


def negate(inner: Condition) -> Condition:
    def condition(look_up: LookUp) -> Any:
        value = inner(look_up)
        return not value if isinstance(value, bool) else None

    return condition


def both(left: Condition, right: Condition) -> Condition:
    def condition(look_up: LookUp) -> Any:
        first = left(look_up)
        if first is False:
            return False
        second = right(look_up)
        if second is False:
            return False
        return True if first is True and second is True else None

    return condition


def either(left: Condition, right: Condition) -> Condition:
    def condition(look_up: LookUp) -> Any:
        first = left(look_up)
        if first is True:
            return True
        second = right(look_up)
        if second is True:
            return True
        return False if first is False and second is False else None

    return condition


def is_number(value: Any) -> bool:
    return isinstance(value, NUMBERS) and not isinstance(value, bool)


def _are_alike(left: Any, right: Any) -> bool:
    """Whether two values have types that can be equal."""
    if isinstance(left, bool) or isinstance(right, bool):
        return isinstance(left, bool) and isinstance(right, bool)
    return isinstance(left, str) == isinstance(right, str)


def equal(left: Condition, right: Condition) -> Condition:
    def condition(look_up: LookUp) -> Any:
        first, second = left(look_up), right(look_up)
        if first is None or second is None:
            return None
        first, second = _as_other(first, second), _as_other(second, first)
        return _are_alike(first, second) and first == second

    return condition


_ORDERS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
}


def ordered(operator: str, left: Condition, right: Condition) -> Condition:
    order = _ORDERS[operator]

    def condition(look_up: LookUp) -> Any:
        first, second = _numeric(left(look_up)), _numeric(right(look_up))
        if first is None or second is None:
            return None
        return is_number(first) and is_number(second) and order(first, second)

    return condition


def _divided(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        # Whole numbers divide as in Java: towards zero.
        quotient = abs(left) // abs(right)
        return quotient if (left < 0) == (right < 0) else -quotient
    return left / right


_ARITHMETIC: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": _divided,
}


def calculated(operator: str, left: Condition, right: Condition) -> Condition:
    operation = _ARITHMETIC[operator]

    def condition(look_up: LookUp) -> Any:
        first, second = _numeric(left(look_up)), _numeric(right(look_up))
        if not is_number(first) or not is_number(second):
            return None
        try:
            found = operation(first, second)
        except (ZeroDivisionError, OverflowError):
            return None
        return found if abs(found) <= NUMBER_MAX else None

    return condition


def signed(inner: Condition) -> Condition:
    def condition(look_up: LookUp) -> Any:
        value = _numeric(inner(look_up))
        return -value if is_number(value) else None

    return condition


def one_of(inner: Condition, values: list[Any]) -> Condition:
    wanted = frozenset((type(value) is bool, isinstance(value, str), value) for value in values)

    def condition(look_up: LookUp) -> Any:
        value = inner(look_up)
        if value is None:
            return None
        if isinstance(value, Untyped) and (False, False, value.number()) in wanted:
            return True
        return (type(value) is bool, isinstance(value, str), value) in wanted

    return condition


def missing(inner: Condition) -> Condition:
    return lambda look_up: inner(look_up) is None


class Patterns:
    """The LIKE patterns of a selector, which share the time for a message."""

    __slots__ = ("size_bytes",)

    def __init__(self) -> None:
        self.size_bytes = 0


def like(inner: Condition, pattern: str, escape: str | None, patterns: Patterns) -> Condition:
    """`%` stands for any string, `_` for one character. After the character `escape` they stand for themselves."""
    patterns.size_bytes += len(pattern.encode(errors="replace"))
    if patterns.size_bytes > LIKE_BYTES_MAX:
        raise ValueError(f"all patterns together exceed {LIKE_BYTES_MAX} bytes")
    regexp = re2.compile("(?s)" + _regexp_of(pattern, escape), _options())

    def condition(look_up: LookUp) -> Any:
        value = inner(look_up)
        if value is None:
            return None
        if not isinstance(value, str):
            return False
        text = value.encode(errors="replace")
        if len(text) * patterns.size_bytes > LIKE_STEPS_MAX:
            return None
        return regexp.fullmatch(text) is not None

    return condition


def _regexp_of(pattern: str, escape: str | None) -> str:
    parts: list[str] = []
    chars = iter(pattern)
    for char in chars:
        if char == escape:
            following = next(chars, None)
            if following is None:
                raise ValueError("nothing follows the escape character of a LIKE pattern")
            parts.append(re2.escape(following))
        elif char == "%":
            parts.append(".*")
        elif char == "_":
            parts.append(".")
        else:
            parts.append(re2.escape(char))
    return "".join(parts)


def _options() -> Any:
    options = re2.Options()
    options.max_mem = _PROGRAM_BYTES_MAX
    options.never_capture = True
    options.log_errors = False
    return options

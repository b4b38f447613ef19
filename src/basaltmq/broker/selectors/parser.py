"""Parses selectors.

    condition   = all of it { OR all of it }
    all of it   = negated { AND negated }
    negated     = [ NOT ] negated | test
    test        = sum [ comparison sum | [NOT] BETWEEN sum AND sum | [NOT] IN (values) | [NOT] LIKE text [ESCAPE text]
                      | IS [NOT] NULL ]
    sum         = product { (+ | -) product }
    product     = signed { (* | /) signed }
    signed      = [ + | - ] signed | literal | name | ( condition )

The parser refuses operands of the wrong kind: a number is not a condition, and a string cannot be added.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import re2

from basaltmq.broker.selectors import conditions as c
from basaltmq.broker.selectors.conditions import Condition, LookUp
from basaltmq.broker.selectors.tokens import END, KEYWORD, NAME, NUMBER, OPERATOR, TEXT, Word, invalid, words_of
from basaltmq.errors import InvalidArgumentError

TEXT_BYTES_MAX: Final = 8192
DEPTH_MAX: Final = 64
WORDS_MAX: Final = 1024
"""Limits of a selector. A message is then evaluated in less than a millisecond."""

_ANY, _BOOLEAN, _NUMERIC, _TEXTUAL = "a property", "a condition", "a number", "a text"


class Selector:
    """A parsed selector."""

    __slots__ = ("_condition", "names", "text")

    def __init__(self, text: str, condition: Condition, names: frozenset[str]) -> None:
        self.text = text
        self.names = names
        """The identifiers that it uses."""
        self._condition = condition

    def accepts(self, look_up: LookUp) -> bool:
        """Whether a message meets the condition. If that is unknown, it does not."""
        return self._condition(look_up) is True


class _Part(NamedTuple):
    kind: str
    evaluate: Condition


def parse(text: str) -> Selector:
    """Parse a selector. Raise InvalidArgumentError if it is not valid."""
    if len(text.encode(errors="surrogatepass")) > TEXT_BYTES_MAX:
        raise InvalidArgumentError(f"a selector exceeds {TEXT_BYTES_MAX} bytes")
    words = words_of(text)
    if len(words) > WORDS_MAX:
        raise InvalidArgumentError(f"a selector has more than {WORDS_MAX} words")
    parser = _Parser(words)
    return Selector(text, parser.whole(), frozenset(parser.names))


class _Parser:
    def __init__(self, words: list[Word]) -> None:
        self.names: set[str] = set()
        self._patterns = c.Patterns()
        self._words = words
        self._at = 0
        self._depth = 0

    def whole(self) -> Condition:
        at = self._next.at
        found = self._condition()
        if self._next.kind != END:
            raise self._unexpected()
        return self._require(found, _BOOLEAN, at).evaluate

    @property
    def _next(self) -> Word:
        return self._words[self._at]

    def _unexpected(self) -> InvalidArgumentError:
        word = self._next
        return invalid("unexpected end" if word.kind == END else f"unexpected {word.value!r:.40}", word.at)

    def _has(self, kind: int, *values: Any) -> bool:
        word = self._next
        return word.kind == kind and (not values or word.value in values)

    def _take(self, kind: int, *values: Any) -> Word:
        if not self._has(kind, *values):
            raise self._unexpected()
        word = self._next
        self._at += 1
        return word

    def _skip(self, kind: int, *values: Any) -> bool:
        if self._has(kind, *values):
            self._at += 1
            return True
        return False

    @staticmethod
    def _require(part: _Part, kind: str, at: int) -> _Part:
        if part.kind not in (kind, _ANY):
            raise invalid(f"{kind} is needed here, not {part.kind}", at)
        return part

    def _condition(self) -> _Part:
        at = self._next.at
        found = self._all()
        while self._skip(KEYWORD, "OR"):
            left = self._require(found, _BOOLEAN, at)
            at = self._next.at
            right = self._require(self._all(), _BOOLEAN, at)
            found = _Part(_BOOLEAN, c.either(left.evaluate, right.evaluate))
        return found

    def _all(self) -> _Part:
        at = self._next.at
        found = self._negated()
        while self._skip(KEYWORD, "AND"):
            left = self._require(found, _BOOLEAN, at)
            at = self._next.at
            right = self._require(self._negated(), _BOOLEAN, at)
            found = _Part(_BOOLEAN, c.both(left.evaluate, right.evaluate))
        return found

    def _negated(self) -> _Part:
        if not self._has(KEYWORD, "NOT"):
            return self._test()
        self._take(KEYWORD)
        self._enter()
        at = self._next.at
        inner = self._require(self._negated(), _BOOLEAN, at)
        self._depth -= 1
        return _Part(_BOOLEAN, c.negate(inner.evaluate))

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise invalid(f"more than {DEPTH_MAX} levels", self._next.at)

    def _test(self) -> _Part:
        at = self._next.at
        left = self._sum()
        if self._has(OPERATOR, "=", "<>", "<", "<=", ">", ">="):
            return self._comparison(left, at)
        if self._skip(KEYWORD, "IS"):
            is_negative = self._skip(KEYWORD, "NOT")
            self._take(KEYWORD, "NULL")
            return self._tested(c.missing(left.evaluate), is_negative)
        is_negative = self._skip(KEYWORD, "NOT")
        if self._skip(KEYWORD, "BETWEEN"):
            return self._between(self._require(left, _NUMERIC, at), is_negative)
        if self._skip(KEYWORD, "IN"):
            return self._tested(c.one_of(left.evaluate, self._values()), is_negative)
        if self._skip(KEYWORD, "LIKE"):
            return self._tested(self._like(self._require(left, _TEXTUAL, at)), is_negative)
        if is_negative:
            raise self._unexpected()
        return left

    @staticmethod
    def _tested(condition: Condition, is_negative: bool) -> _Part:
        return _Part(_BOOLEAN, c.negate(condition) if is_negative else condition)

    def _comparison(self, left: _Part, at: int) -> _Part:
        operator = self._take(OPERATOR).value
        right_at = self._next.at
        right = self._sum()
        if operator in ("=", "<>"):
            if right.kind != _ANY:
                self._require(left, right.kind, at)
            return self._tested(c.equal(left.evaluate, right.evaluate), operator == "<>")
        self._require(left, _NUMERIC, at)
        self._require(right, _NUMERIC, right_at)
        return _Part(_BOOLEAN, c.ordered(operator, left.evaluate, right.evaluate))

    def _between(self, value: _Part, is_negative: bool) -> _Part:
        at = self._next.at
        low = self._require(self._sum(), _NUMERIC, at)
        self._take(KEYWORD, "AND")
        at = self._next.at
        high = self._require(self._sum(), _NUMERIC, at)
        above = c.ordered(">=", value.evaluate, low.evaluate)
        below = c.ordered("<=", value.evaluate, high.evaluate)
        return self._tested(c.both(above, below), is_negative)

    def _values(self) -> list[Any]:
        """Read the values of IN. JMS allows strings only, RocketMQ also numbers."""
        self._take(OPERATOR, "(")
        values: list[Any] = []
        while True:
            if self._has(NUMBER) or self._has(TEXT):
                values.append(self._take(self._next.kind).value)
            else:
                self._take(OPERATOR, "-")
                values.append(-self._take(NUMBER).value)
            if not self._skip(OPERATOR, ","):
                break
        self._take(OPERATOR, ")")
        return values

    def _like(self, value: _Part) -> Condition:
        word = self._take(TEXT)
        escape = self._take(TEXT).value if self._skip(KEYWORD, "ESCAPE") else None
        if escape is not None and len(escape) != 1:
            raise invalid("the escape of LIKE must be one character", word.at)
        try:
            return c.like(value.evaluate, word.value, escape, self._patterns)
        except (ValueError, UnicodeEncodeError, re2.error) as error:
            raise invalid(f"the pattern of LIKE is not valid: {error}", word.at) from None

    def _sum(self) -> _Part:
        at = self._next.at
        found = self._product()
        while self._has(OPERATOR, "+", "-"):
            found = self._calculated(found, at, self._product)
        return found

    def _product(self) -> _Part:
        at = self._next.at
        found = self._signed()
        while self._has(OPERATOR, "*", "/"):
            found = self._calculated(found, at, self._signed)
        return found

    def _calculated(self, left: _Part, at: int, operand: Any) -> _Part:
        operator = self._take(OPERATOR).value
        self._require(left, _NUMERIC, at)
        at = self._next.at
        right = self._require(operand(), _NUMERIC, at)
        return _Part(_NUMERIC, c.calculated(operator, left.evaluate, right.evaluate))

    def _signed(self) -> _Part:
        if not self._has(OPERATOR, "+", "-"):
            return self._single()
        operator = self._take(OPERATOR).value
        self._enter()
        at = self._next.at
        inner = self._require(self._signed(), _NUMERIC, at)
        self._depth -= 1
        return inner if operator == "+" else _Part(_NUMERIC, c.signed(inner.evaluate))

    def _single(self) -> _Part:
        if self._has(NAME):
            name = self._take(NAME).value
            self.names.add(name)
            return _Part(_ANY, c.named(name))
        if self._has(NUMBER):
            return _Part(_NUMERIC, c.constant(self._take(NUMBER).value))
        if self._has(TEXT):
            return _Part(_TEXTUAL, c.constant(self._take(TEXT).value))
        if self._has(KEYWORD, "TRUE", "FALSE"):
            return _Part(_BOOLEAN, c.constant(self._take(KEYWORD).value == "TRUE"))
        self._take(OPERATOR, "(")
        self._enter()
        found = self._condition()
        self._depth -= 1
        self._take(OPERATOR, ")")
        return found

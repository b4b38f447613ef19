"""Headers exchanges: the index finds the same bindings as a full comparison, with few comparisons."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.broker.routing.exchange import (
    MATCH_MODES,
    QUEUE,
    Binding,
    Destination,
    HeadersTable,
    _Condition,
    header_condition,
)
from basaltmq.broker.routing.topology import hash_arguments

NAMES = st.sampled_from(["a", "b", "c", "x-d"])
VALUES = st.sampled_from([None, 0, 1, True, False, 1.0, "1", "x", b"x", [1], [2], {"n": 1}])
HEADERS = st.dictionaries(NAMES, VALUES, max_size=4)
ASKED = st.tuples(st.sampled_from([None, *MATCH_MODES]), HEADERS, st.integers(0, 3))


def binding(number: int, mode: str | None, fields: dict[str, Any]) -> Binding:
    arguments = fields if mode is None else {**fields, "x-match": mode}
    return Binding("x", Destination(QUEUE, f"q{number}"), "", arguments, hash_arguments(arguments), True)


@pytest.mark.spec("E6")
@given(st.lists(ASKED, max_size=12), st.lists(HEADERS, min_size=1, max_size=4), st.integers(0, 12))
def test_the_index_matches_as_a_full_scan(
    asked: list[tuple[str | None, dict[str, Any], int]], messages: list[dict[str, Any]], removed: int
) -> None:
    table = HeadersTable()
    bound = {each.identity: each for each in (binding(at, mode, fields) for mode, fields, at in asked)}
    for each in bound.values():
        table.add(each)
    for each in list(bound.values())[:removed]:
        table.remove(bound.pop(each.identity))
    for headers in messages:
        expected = {each.destination for each in bound.values() if header_condition(each.arguments).is_met(headers)}
        assert table.match([], headers) == expected


@pytest.mark.promise("P13")
def test_a_message_is_compared_with_few_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    table = HeadersTable()
    for number in range(3000):
        mode = "any" if number % 2 else "all"
        table.add(binding(number, mode, {"n": number, "kind": "order"}))
    compared = 0
    met = _Condition.is_met

    def counted(self: _Condition, headers: dict[str, Any]) -> bool:
        nonlocal compared
        compared += 1
        return met(self, headers)

    monkeypatch.setattr(_Condition, "is_met", counted)
    assert table.match([], {"n": 17, "kind": "none"}) == {Destination(QUEUE, "q17")}
    assert table.match([], {"n": 18, "kind": "none"}) == set()
    assert compared == 2

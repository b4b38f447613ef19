"""Wire formats of the API: tables and properties as JSON, pages of lists, Prometheus' text, statuses of errors."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq import errors
from basaltmq.admin.http.errors import STATUS, http_error, status_of
from basaltmq.admin.http.message import HttpError, Request
from basaltmq.admin.http.paging import listing, only_columns
from basaltmq.admin.http.routes import Call
from basaltmq.admin.monitoring.exposition import Metric, expose
from basaltmq.admin.monitoring.rates import SAMPLES_MAX, Rates
from basaltmq.admin.objects.json_tables import payload_of, properties_of, shown_payload, shown_properties, shown_table

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=20) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "content_type": st.text(max_size=40),
            "delivery_mode": st.integers(1, 2),
            "priority": st.integers(0, 255),
            "timestamp": st.integers(0, 2**63),
            "correlation_id": st.text(max_size=40),
            "headers": st.dictionaries(st.text(max_size=20), values, min_size=1, max_size=4),
        },
    )
)
def test_properties_round_trip_through_json(given_: dict[str, Any]) -> None:
    assert shown_properties(properties_of(given_)) == given_


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nope": 1}, "unknown property 'nope'"),
        ({"priority": "high"}, "priority"),
        ({"headers": [1]}, "headers must be an object"),
    ],
)
def test_invalid_properties_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(HttpError, match=said):
        properties_of(wrong)


def test_values_that_json_cannot_represent_are_marked() -> None:
    assert shown_table({"a": b"\xff", "b": b"text", "c": Decimal("1.5"), "d": [b"\xfe"]}) == {
        "a": {"base64": "/w=="},
        "b": "text",
        "c": 1.5,
        "d": [{"base64": "/g=="}],
    }


@given(st.binary(max_size=60))
def test_payloads_round_trip_as_text_or_base64(raw: bytes) -> None:
    assert payload_of(*shown_payload(raw, "auto", None)) == raw
    assert payload_of(*shown_payload(raw, "base64", None)) == raw
    assert payload_of(*shown_payload(raw, "base64", 10)) == raw[:10]


def listed(items: list[dict[str, Any]], query: str) -> Any:
    request = Request("GET", "/?" + query, {})
    request.split()
    call = Call(request, {}, None)
    found = asyncio.run(listing(call, [(each["name"], each) for each in items], lambda each: each))
    return only_columns(call, found)


ITEMS = [{"name": name, "size": size, "deep": {"x": size}} for name, size in (("b", 3), ("a", 1), ("ab", None))]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", ["a", "ab", "b"]),
        ("sort_reverse=true", ["b", "ab", "a"]),
        ("name=a", ["a", "ab"]),
        ("sort=size", ["ab", "a", "b"]),
        ("sort=deep.x&sort_reverse=true", ["b", "a", "ab"]),
        ("sort=nothing", ["a", "ab", "b"]),
    ],
)
def test_lists_are_filtered_and_sorted(query: str, names: list[str]) -> None:
    found = listed(ITEMS, query)
    if query == "sort=nothing":
        assert sorted(each["name"] for each in found) == names
    else:
        assert [each["name"] for each in found] == names


def test_pages_cover_the_list_once() -> None:
    seen = [each["name"] for number in (1, 2) for each in listed(ITEMS, f"page={number}&page_size=2")["items"]]
    assert seen == ["a", "ab", "b"]
    assert listed([], "page=1") == {
        "filtered_count": 0,
        "item_count": 0,
        "items": [],
        "page": 1,
        "page_count": 1,
        "page_size": 100,
        "total_count": 0,
    }
    assert listed(ITEMS, "columns=deep.x,nope")[0] == {"deep": {"x": 1}}
    for query in ("page=0", "page=3&page_size=2", "page=x", "page=1&page_size=501", "page=-1", "page=1e3"):
        with pytest.raises(HttpError) as caught:
            listed(ITEMS, query)
        assert caught.value.status == 400


def test_labels_and_numbers_have_the_prometheus_format() -> None:
    samples: list[tuple[dict[str, str], float]] = [({"v": 'a"\\\nb'}, 3), ({}, 0.5), ({}, float("nan"))]
    assert expose([Metric("m", "gauge", "About\nit.", samples)]) == (
        b'# HELP m About\\nit.\n# TYPE m gauge\nm{v="a\\"\\\\\\nb"} 3\nm 0.5\nm NaN\n'
    )


def test_rates_are_computed_since_a_sufficiently_old_sample() -> None:
    now = [0.0]
    rates = Rates(lambda: now[0])
    thing, other = object(), object()
    assert rates.of("q", thing, {"publish": 100}) == {"publish": 0.0}
    now[0] = 4.0
    assert rates.of("q", thing, {"publish": 300}) == {"publish": 0.0}, "too early to tell"
    now[0] = 10.0
    assert rates.of("q", thing, {"publish": 300}) == {"publish": 20.0}
    now[0] = 12.0
    assert rates.stats("q", thing, {"publish": 400}) == {"publish": 400, "publish_details": {"rate": 20.0}}
    now[0] = 20.0
    assert rates.of("q", thing, {"publish": 300}) == {"publish": 0.0}
    assert rates.of("q", other, {"publish": 900}) == {"publish": 0.0}, "another queue of the name"
    for number in range(SAMPLES_MAX + 10):
        rates.of(number, thing, {})
    assert len(rates._samples) == SAMPLES_MAX


def every_error(root: type[errors.BasaltError]) -> list[type[errors.BasaltError]]:
    return [root, *(each for below in root.__subclasses__() for each in every_error(below))]


def test_every_error_has_a_status_that_separates_client_and_server_errors() -> None:
    theirs = (errors.InvalidArgumentError, errors.NotFoundError, errors.AlreadyExistsError, errors.AccessRefusedError)
    for kind in every_error(errors.BasaltError):
        status = next(STATUS[each] for each in kind.__mro__ if each in STATUS)
        assert 400 <= status < 600
        if issubclass(kind, theirs):
            assert status < 500, kind
    assert status_of(errors.VHostNotFoundError("x")) == 404
    retried = http_error(errors.StoreStalledError("later"))
    assert (retried.status, retried.headers) == (503, {"Retry-After": "1"})

"""Long responses are built in portions, and other work runs in between (P13)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from basaltmq.admin.http.message import ENCODED_PER_TURN, long_json_response
from basaltmq.admin.monitoring.overview import Overview
from basaltmq.broker.scheduling import turns
from basaltmq.broker.scheduling.turns import in_turns

pytestmark = pytest.mark.promise("P13")


def turns_during(work: Coroutine[Any, Any, Any]) -> tuple[Any, int]:
    """Return the result of the work, and the number of turns of other work meanwhile."""

    async def run() -> tuple[Any, int]:
        task = asyncio.create_task(work)
        others = 0
        while not task.done():
            await asyncio.sleep(0)
            others += 1
        return task.result(), others

    return asyncio.run(run())


@pytest.mark.parametrize("size", [0, 1, ENCODED_PER_TURN, ENCODED_PER_TURN + 1, 10 * ENCODED_PER_TURN])
def test_a_long_response_is_encoded_unchanged_in_portions(size: int) -> None:
    items = [{"name": f"q{number}", "arguments": {"x": None}} for number in range(size)]
    for value in (items, {"items": items, "page": 1, 'odd " name': [items[:3]]}):
        response, others = turns_during(long_json_response(value))
        assert msgspec.json.decode(response.body) == value
        if size > ENCODED_PER_TURN:
            assert others >= size // ENCODED_PER_TURN


def test_the_overview_counts_channels_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    connection = SimpleNamespace(info=lambda: {"channels": 2})
    scope: Any = SimpleNamespace(connections=[connection] * 50, listed=lambda call: [], node_name="node")
    unused: Any = None
    call: Any = SimpleNamespace(who=SimpleNamespace(tags=[]))
    found, others = turns_during(Overview(scope, unused, unused, 0.0).overview(call))
    assert found["object_totals"]["connections"] == 50
    assert found["object_totals"]["channels"] == 100
    assert others >= 50


def test_many_items_are_built_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    made, others = turns_during(in_turns(range(50), str))
    assert made == [str(number) for number in range(50)]
    assert others >= 50

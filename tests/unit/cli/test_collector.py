"""The garbage collector freezes what survives a slow full collection."""

from __future__ import annotations

import gc

import pytest

from basaltmq.cli.server.collector import SLOW_S, Collector


@pytest.mark.promise("P13")
@pytest.mark.parametrize(("took_s", "generation", "freezes"), [(2 * SLOW_S, 2, 1), (SLOW_S / 2, 2, 0), (1.0, 1, 0)])
def test_survivors_of_a_slow_full_collection_are_frozen(took_s: float, generation: int, freezes: int) -> None:
    frozen: list[bool] = []
    now_s = 0.0
    before = list(gc.callbacks)
    with Collector(freeze=lambda: frozen.append(True), clock_s=lambda: now_s):
        frozen.clear()
        (callback,) = [each for each in gc.callbacks if each not in before]
        callback("start", {"generation": generation})
        now_s += took_s
        callback("stop", {"generation": generation})
        assert len(frozen) == freezes
    assert gc.callbacks == before

"""Alarms: notifications that publishers are blocked."""

from __future__ import annotations

from pathlib import Path

import pytest

from basaltmq.broker.resources.flow import Alarms, Watch


@pytest.mark.promise("P8")
def test_publishers_are_notified_once_of_their_alarms() -> None:
    alarms = Alarms()
    everybody: list[str | None] = []
    one: list[str | None] = []
    two: list[str | None] = []
    alarms.listen(everybody.append)
    alarms.listen(one.append, "one")
    stop = alarms.listen(two.append, "two")
    alarms.set("store", "one is behind", "one")
    assert (everybody, one, two) == (["one is behind"], ["one is behind"], [])
    alarms.set("disk", "no space")
    assert (everybody, one, two) == (["one is behind"], ["one is behind"], ["no space"])
    alarms.set("store", None, "one")
    assert (everybody, one) == (["one is behind"], ["one is behind"]), "the disk still holds them"
    stop()
    alarms.set("disk", None)
    assert (everybody[-1], one[-1], two) == (None, None, ["no space"])
    assert alarms.reason() is None
    alarms.set("memory", "no room")
    late: list[str | None] = []
    alarms.listen(late.append)
    assert late == ["no room"]


def test_a_failing_listener_does_not_affect_others() -> None:
    alarms = Alarms()
    heard: list[str | None] = []

    def bad(reason: str | None) -> None:
        raise RuntimeError("the test fails")

    alarms.listen(bad)
    alarms.listen(heard.append)
    alarms.set("disk", "no space")
    assert heard == ["no space"]


def test_disk_and_memory_alarms_have_hysteresis() -> None:
    alarms = Alarms()
    free, resident = [1000], [100]
    watch = Watch(
        alarms,
        Path("/"),
        free_min_bytes=lambda: 500,
        resident_max_bytes=lambda: 1000,
        free=lambda path: free[0],
        resident=lambda: resident[0],
    )

    def names() -> list[str]:
        watch.look()
        return [name for _, name, _ in alarms.all()]

    assert names() == []
    free[0] = 499
    assert names() == ["disk"]
    free[0] = 501
    assert names() == ["disk"]
    free[0] = 530
    assert names() == []
    resident[0] = 1001
    assert names() == ["memory"]
    resident[0] = 999
    assert names() == ["memory"]
    resident[0] = 900
    assert names() == []


def test_a_failed_disk_measurement_keeps_the_alarm() -> None:
    alarms = Alarms()

    def broken(path: Path) -> int:
        raise OSError(5, "Input/output error")

    watch = Watch(alarms, Path("/"), free_min_bytes=lambda: 1, resident_max_bytes=lambda: 1, free=broken)
    watch.look()
    assert alarms.all() == []

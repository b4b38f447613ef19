"""Views of streams compared with the writer under random operations."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.unit.streams.view_rig import Writer, seen

from basaltmq.log.batches.record import Record
from basaltmq.streams.view import StreamView


def open_view(writer: Writer) -> StreamView:
    return StreamView.open(writer.path, clock_ms=writer.clock_ms)


@pytest.mark.promise("P3")
@pytest.mark.promise("P10")
@pytest.mark.parametrize("seed", range(2))
def test_a_view_matches_the_writer_under_random_operations(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    writer = Writer(tmp_path / "data", segment_bytes=2048, lanes=1 + seed % 2)
    made = 0
    topics: list[str] = []
    view = open_view(writer)
    for step in range(150):
        action = chance.randrange(100)
        topic = chance.choice(topics) if topics else None
        if topic is None or action < 5:
            made += 1
            name = f"t{made % 4}" if f"t{made % 4}" not in topics else f"n{made}"
            durability = chance.choice(["synced", "written"])
            writer.create(name, durability=durability, compact=chance.random() < 0.3)
            topics.append(name)
        elif action < 65:
            count = chance.randrange(1, 6)
            expire = writer.now_ms + chance.randrange(1, 2000) if chance.random() < 0.2 else 0
            records = [
                Record(b"%d-%d" % (step, at) * 20, b"k%d" % chance.randrange(5), (), (b"t%d" % (at % 2),), -1, expire)
                for at in range(count)
            ]
            writer.put(topic, *records, wait=chance.random() < 0.5)
        elif action < 70:
            writer.plane.drivers.delete_by_key(topic, 0, b"k%d" % chance.randrange(5))
        elif action < 75:
            end = writer.plane.drivers.info(topic, 0).high_watermark
            writer.plane.drivers.delete_by_offset(topic, 0, [chance.randrange(end + 1) for _ in range(5)])
        elif action < 79:
            end = writer.plane.drivers.info(topic, 0).high_watermark
            writer.plane.drivers.delete_records_before(topic, 0, chance.randrange(end + 1))
        elif action < 86:
            writer.now_ms += chance.randrange(1500)
            writer.engine.retain(writer.now_ms)
        elif action < 89:
            writer.clean()
        elif action < 92:
            writer.engine.checkpoint()
        elif action < 94:
            writer.plane.topics.delete(topic)
            topics.remove(topic)
        elif action < 97:
            writer.close()
            writer.open()
        else:
            writer.engine.sync()
            writer.kill()
            writer.open()
        if chance.random() < 0.4:
            if chance.random() < 0.1:
                view.close()
                view = open_view(writer)
            writer.engine.sync()
            view.refresh()
            assert [each.name for each in view.topics()] == sorted(topics)
            for each in topics:
                assert seen(view, each) == writer.read_all(each), f"step {step}"
                assert view.info(each, 0) == writer.plane.drivers.info(each, 0), f"step {step}"
                key = b"k%d" % chance.randrange(5)
                start = writer.plane.drivers.info(each, 0).start_offset
                assert (
                    view.read(each, 0, start, key=key).records()
                    == writer.plane.drivers.read_by_key(each, 0, key, start).records()
                )
    view.close()
    writer.close()

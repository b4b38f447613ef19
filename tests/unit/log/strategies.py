"""Records as hypothesis makes them."""

from __future__ import annotations

from hypothesis import strategies as st

from basaltmq.log.record import NEVER, Record

TIMES = st.integers(0, 1 << 45)
HEADERS = st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=9)), max_size=3)


@st.composite
def records(draw: st.DrawFn) -> Record:
    return Record(
        draw(st.binary(max_size=40)),
        draw(st.none() | st.binary(max_size=9)),
        tuple(draw(HEADERS)),
        tuple(draw(st.lists(st.binary(max_size=9), max_size=3))),
        draw(TIMES),
        draw(st.just(NEVER) | st.integers(1, 1 << 45)),
    )


BATCHES = st.lists(records(), min_size=1, max_size=12)

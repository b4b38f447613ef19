"""The ledger: the state of every message as its clients know it, and checks of deliveries.

A message has a place (virtual host and queue, or topic), a producer and a number that the producer counts up. The
ledger keeps one byte per message and place, so an hour of load costs some megabytes.

    TRIED       the producer sent it
    CONFIRMED   the broker confirmed it: it must not be lost
    SETTLING    a consumer sent an ack: it may or may not be delivered again
    SETTLED     the ack is durable: it must not be delivered again
    SEEN        a reader got it at least once
    CANCELLED   its transaction was rolled back: it must not be visible
    REJECTED    a consumer dead-lettered it: it is in its queue or in the dead-letter queue

Every violation is a text in `problems`. Clients call `seen` for each delivery, so most are found immediately.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple, TypeAlias

TRIED = 1
CONFIRMED = 2
SETTLING = 4
SETTLED = 8
SEEN = 16
CANCELLED = 32
REJECTED = 64

PROBLEMS_MAX = 50
"""Problems kept. The first ones show the cause."""

Place: TypeAlias = str


class Label(NamedTuple):
    """One message."""

    producer: str
    number: int

    def body(self, size_bytes: int = 0) -> bytes:
        return f"{self.producer} {self.number} ".encode().ljust(size_bytes, b".")

    @classmethod
    def of(cls, body: bytes) -> Label:
        """Return the label of a body. A changed byte is an error."""
        producer, number, rest = body.split(b" ", 2)
        if rest.strip(b"."):
            raise ValueError(f"a body of {len(body)} bytes was changed: {body[:100]!r}")
        return cls(producer.decode(), int(number))


class Found(NamedTuple):
    """A message that the final drain found."""

    place: Place
    label: Label


class Ledger:
    """The states of all messages. Thread-safe."""

    def __init__(self, on_problem: Callable[[str], None] = lambda _: None) -> None:
        self._on_problem = on_problem
        self.problems: list[str] = []
        self.groups: list[list[Found]] = []
        """Messages of transactions with unknown outcome: all of a transaction exist, or none."""
        self.committed: dict[tuple[str, int], int] = {}
        """Offsets that a consumer group has committed, by topic and partition."""
        self._states: dict[tuple[Place, str], bytearray] = {}
        self._next: dict[str, int] = {}
        self._lock = threading.Lock()

    def problem(self, text: str) -> None:
        with self._lock:
            if len(self.problems) < PROBLEMS_MAX and text not in self.problems:
                self.problems.append(text)
                self._on_problem(text)

    def next_label(self, producer: str, count: int = 1) -> list[Label]:
        with self._lock:
            first = self._next.get(producer, 0)
            self._next[producer] = first + count
        return [Label(producer, first + at) for at in range(count)]

    def next_number(self, producer: str) -> int:
        """Return the first number that a producer in another process has not used."""
        return self._next.get(producer, 0)

    def reached(self, producer: str, number: int) -> None:
        with self._lock:
            self._next[producer] = max(number, self._next.get(producer, 0))

    def mark(self, places: Iterable[Place], labels: Iterable[Label], state: int) -> None:
        with self._lock:
            labels = list(labels)
            for place in places:
                for label in labels:
                    states = self._states.setdefault((place, label.producer), bytearray())
                    if len(states) <= label.number:
                        states.extend(bytes(max(1024, label.number + 1 - len(states))))
                    states[label.number] |= state

    def state(self, place: Place, label: Label) -> int:
        states = self._states.get((place, label.producer), b"")
        return states[label.number] if label.number < len(states) else 0

    def seen(self, place: Place, label: Label, where: str) -> None:
        """Record a delivery. It is a problem if the message must not exist."""
        state = self.state(place, label)
        if not state & TRIED:
            self.problem(f"{where}: {label} of {place} was never sent there")
        elif state & CANCELLED:
            self.problem(f"{where}: {label} of {place} was rolled back and is there")
        elif state & SETTLED:
            self.problem(f"{where}: {label} of {place} came again after its ack was written")
        self.mark((place,), (label,), SEEN)

    def snapshot(self) -> Ledger:
        """Return a copy of the ledger without problems."""
        copy = Ledger()
        with self._lock:
            copy.groups = [list(group) for group in self.groups]
            copy.committed = dict(self.committed)
            copy._states = {key: bytearray(states) for key, states in self._states.items()}
            copy._next = dict(self._next)
        return copy

    def places(self) -> set[Place]:
        return {place for place, _ in self._states}

    def messages(self, place: Place) -> Iterator[tuple[Label, int]]:
        """Yield every message of a place with its state."""
        for (its_place, producer), states in sorted(self._states.items()):
            if its_place == place:
                for number, state in enumerate(states):
                    if state:
                        yield Label(producer, number), state

    def counts(self) -> dict[str, int]:
        """Return the numbers of confirmed and settled messages."""
        found: Counter[int] = Counter()
        for states in list(self._states.values()):
            found.update(Counter(bytes(states)))
        return {
            "confirmed": sum(count for state, count in found.items() if state & CONFIRMED),
            "settled": sum(count for state, count in found.items() if state & SETTLED),
        }

    def compare(self, place: Place, found: Iterable[Label], *, destructive: bool = True) -> list[Label]:
        """Compare with a drain of a place. Return missing confirmed messages.

        `destructive`: consumers take messages away, so a message whose ack was sent may be missing.
        """
        drained: dict[Label, int] = {}
        for label in found:
            drained[label] = drained.get(label, 0) + 1
            self.seen(place, label, "final drain")
        for label, count in drained.items():
            if count > 1:
                self.problem(f"final drain: {label} of {place} is there {count} times")
        missing = []
        for label, state in self.messages(place):
            is_taken = destructive and state & (SETTLING | SETTLED)
            if state & CONFIRMED and not is_taken and label not in drained:
                missing.append(label)
        return missing

    def check_groups(self, drained: Container[Place]) -> None:
        """Check that transactions with unknown outcome are complete or absent, if their places were drained."""
        for group in self.groups:
            if any(each.place not in drained for each in group):
                continue
            there = [each for each in group if self.state(each.place, each.label) & SEEN]
            if there and len(there) != len(group):
                self.problem(f"a transaction is there in part: {len(there)} of {len(group)}, such as {there[0]}")


def check_order(ledger: Ledger, place: Place, found: Iterable[Label]) -> None:
    """Check that messages of each producer are in the order in which they were sent."""
    last: dict[str, int] = {}
    for producer, number in found:
        if number < last.get(producer, -1):
            ledger.problem(f"{place}: {producer} {number} comes after {last[producer]}")
        last[producer] = max(number, last.get(producer, -1))

"""A change: the batch of one operation (or of several that belong together), and what memory does about it.

What a change takes away (a message leased, acked, dropped) is taken from memory at once, so that nobody else gets it,
and put back by `undo` if the write fails. What a change adds (a message published, returned, moved) is shown by
`after`, once the write has returned. So memory never shows what the disk has not, and a refused write costs nothing.

A message that is published and settled inside one change never reaches the disk: its rows are cancelled, and the
publisher is confirmed like any other when the change is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from basaltmq.errors import BasaltError
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family

Step: TypeAlias = Callable[[], None]
A = TypeVar("A")
B = TypeVar("B")


class Change:
    """Rows to write together, and the steps in memory that hang on it."""

    __slots__ = (
        "_cancelled",
        "_steps_after",
        "_steps_before",
        "_steps_last",
        "_steps_undo",
        "at",
        "batch",
        "fresh",
        "is_callers_fault",
        "marks",
        "now_ns",
        "ready",
        "refusal",
        "tell",
        "told",
    )

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.batch = Batch()
        self.at = ""
        """The queue that the operation was last at: the one that an unexpected error is blamed on."""
        self.is_callers_fault = False
        """Whether what failed is a function that the caller handed in."""
        self.fresh: set[bytes] = set()
        """Keys of messages that were published and handed out in this change."""
        self.marks: set[object] = set()
        """What need not be put twice in one change."""
        self.ready: dict[str, None] = {}
        """Queues in which the change makes messages ready."""
        self.refusal: BasaltError | None = None
        """To be raised when the change is written: the call did something, but not what was asked."""
        self.told: list[Any] | None = None
        """What is to be told of the messages of the change when it is written (recorder.py), by `tell`."""
        self.tell: Callable[[list[Any]], None] | None = None
        self._steps_before: dict[object, Step] = {}
        self._steps_after: list[Step] = []
        self._steps_undo: list[Step] = []
        self._steps_last: dict[object, Step] = {}
        self._cancelled: set[tuple[Family, bytes]] = set()

    def has_before(self, owner: object) -> bool:
        return owner in self._steps_before

    def before(self, owner: object, step: Step) -> None:
        """Run `step` just before the write, once per owner: rows that sum up the whole change."""
        self._steps_before[owner] = step

    def after(self, step: Step) -> None:
        """Run `step` when the write has returned. It must not fail."""
        self._steps_after.append(step)

    def last(self, owner: object, step: Step) -> None:
        """Run `step`, once per owner, when memory shows all of the change."""
        self._steps_last[owner] = step

    def undo(self, step: Step) -> None:
        """Run `step` if the change is not written. Steps run from the last to the first."""
        self._steps_undo.append(step)

    def cancel(self, family: Family, key: bytes) -> None:
        """Forget every put of this row in this change."""
        self._cancelled.add((family, key))

    def seal(self) -> Batch:
        """The batch to write, with what sums it up and without what was cancelled."""
        for step in list(self._steps_before.values()):
            step()
        if self._cancelled:
            cancelled = self._cancelled
            self.batch.ops = [op for op in self.batch.ops if (op[1], op[2]) not in cancelled]
        return self.batch

    def applied(self) -> Exception | None:
        """Run what follows the write, all of it; the first error, which leaves memory in doubt and not the disk."""
        failure = _run([*self._steps_after, *self._steps_last.values()])
        if self.told is not None and self.tell is not None:
            self.tell(self.told)
        if failure is None:
            self._forget_steps()
        return failure

    def refused(self) -> Exception | None:
        """Put memory back, all of it; the first error, which leaves memory in doubt."""
        failure = _run(self._steps_undo[::-1])
        if failure is None:
            self._forget_steps()
        return failure

    def _forget_steps(self) -> None:
        """Steps refer to their change. Without this cycle the batch is freed at once, not by the garbage collector."""
        self._steps_before = {}
        self._steps_after = []
        self._steps_undo = []
        self._steps_last = {}

    def owners(self) -> list[object]:
        """Whose rows sum up the change: the queues it changed."""
        return list(self._steps_before)

    def of_caller(self, ask: Callable[[A], B], about: A) -> B:
        """Ask a function that a caller handed in; its errors are the caller's, and no queue is blamed for them."""
        try:
            return ask(about)
        except Exception:
            self.is_callers_fault = True
            raise


def _run(steps: Sequence[Step]) -> Exception | None:
    failure: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            failure = failure or error
    return failure

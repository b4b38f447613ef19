"""A change: the batch of one or more operations, and the updates of memory that belong to it.

What a change removes (a message leased, acknowledged, dropped) leaves memory at once, so that no other consumer gets
it. `undo` restores it if the write fails. What a change adds (a message published, returned, moved) becomes visible in
`after`, when the write has returned. So memory never shows more than the disk, and a failed write has no effect.

A message that is published and acknowledged inside one change never reaches the disk, because its rows are cancelled.
Its publisher still gets the confirm when the change is durable.
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
    """Rows to write together, and the memory updates that depend on the write."""

    __slots__ = (
        "_cancelled",
        "_steps_after",
        "_steps_before",
        "_steps_last",
        "_steps_undo",
        "at",
        "batch",
        "events",
        "fresh",
        "is_callers_fault",
        "marks",
        "now_ns",
        "publish_events",
        "ready",
        "refusal",
    )

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.batch = Batch()
        self.at = ""
        """Name of the queue that the operation last touched. An unexpected error makes this queue fail."""
        self.is_callers_fault = False
        """Whether a function passed in by the caller raised the error."""
        self.fresh: set[bytes] = set()
        """Keys of messages that were published and delivered in this change."""
        self.marks: set[object] = set()
        """Leases and timer rows that this change has added."""
        self.ready: dict[str, None] = {}
        """Queues in which the change makes messages ready."""
        self.refusal: BasaltError | None = None
        """Error to raise after the write: the operation took effect only in part."""
        self.events: list[Any] | None = None
        """Message events of this change. `publish_events` publishes them after the write (`events/recorder.py`)."""
        self.publish_events: Callable[[list[Any]], None] | None = None
        self._steps_before: dict[object, Step] = {}
        self._steps_after: list[Step] = []
        self._steps_undo: list[Step] = []
        self._steps_last: dict[object, Step] = {}
        self._cancelled: set[tuple[Family, bytes]] = set()

    def has_before(self, owner: object) -> bool:
        return owner in self._steps_before

    def before(self, owner: object, step: Step) -> None:
        """Run `step` just before the write, once per owner, to add rows that summarize the whole change."""
        self._steps_before[owner] = step

    def after(self, step: Step) -> None:
        """Run `step` when the write has returned. It must not fail."""
        self._steps_after.append(step)

    def last(self, owner: object, step: Step) -> None:
        """Run `step`, once per owner, when memory shows the whole change."""
        self._steps_last[owner] = step

    def undo(self, step: Step) -> None:
        """Run `step` if the change is not written. Undo steps run in reverse order."""
        self._steps_undo.append(step)

    def cancel(self, family: Family, key: bytes) -> None:
        """Discard every put of this row in this change."""
        self._cancelled.add((family, key))

    def seal(self) -> Batch:
        """Return the batch to write: with summary rows, without cancelled rows."""
        for step in list(self._steps_before.values()):
            step()
        if self._cancelled:
            cancelled = self._cancelled
            self.batch.ops = [op for op in self.batch.ops if (op[1], op[2]) not in cancelled]
        return self.batch

    def applied(self) -> Exception | None:
        """Run all steps that follow the write. Return the first error: the disk is right, memory may be wrong."""
        failure = _run([*self._steps_after, *self._steps_last.values()])
        if self.events is not None and self.publish_events is not None:
            self.publish_events(self.events)
        if failure is None:
            self._forget_steps()
        return failure

    def refused(self) -> Exception | None:
        """Run all undo steps. Return the first error: memory may be wrong."""
        failure = _run(self._steps_undo[::-1])
        if failure is None:
            self._forget_steps()
        return failure

    def _forget_steps(self) -> None:
        """Break the reference cycle of steps and change, so that the batch is freed without the garbage collector."""
        self._steps_before = {}
        self._steps_after = []
        self._steps_undo = []
        self._steps_last = {}

    def owners(self) -> list[object]:
        """Return the owners of `before` steps, which are the queues that the change modified."""
        return list(self._steps_before)

    def call_filter(self, wanted: Callable[[A], B], message: A) -> B:
        """Call a function of the caller. Its errors are raised to the caller and do not fail the queue."""
        try:
            return wanted(message)
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

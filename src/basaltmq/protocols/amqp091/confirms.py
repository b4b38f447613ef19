"""Publisher confirms: which messages of a channel are answered, and the fewest answers that say so.

Messages are numbered from 1 on. `low` is the number up to which all are answered. An answer that continues from there
is one `multiple` for all of them, and covers those answered before it out of order, which clients ignore. Refusals
are said one by one, before any `multiple` that would cover them.
"""

from __future__ import annotations

from collections.abc import Sequence

from basaltmq.protocols.amqp091.outbox import encode_confirm


class Confirms:
    """The numbers of a channel in confirm mode."""

    __slots__ = ("_ahead", "_channel", "last", "low")

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self.last = 0
        """The number of the last message published."""
        self.low = 0
        self._ahead: set[int] = set()
        """Answered numbers above `low`."""

    @property
    def unanswered(self) -> int:
        return self.last - self.low - len(self._ahead)

    def answer(self, numbers: Sequence[int], ok: bool, out: list[bytes]) -> None:
        """Answer messages, ascending, each once."""
        ahead = self._ahead
        if not ahead and numbers[0] == self.low + 1 and numbers[-1] - numbers[0] == len(numbers) - 1 and ok:
            self.low = numbers[-1]
            out.append(encode_confirm(self._channel, self.low, len(numbers) > 1, True))
            return
        if not ok:
            out += [encode_confirm(self._channel, number, False, False) for number in numbers]
        low = self.low
        ahead.update(numbers)
        while low + 1 in ahead:
            low += 1
            ahead.remove(low)
        if ok:
            # What went through in one run to `low` is one answer; the rest stays single.
            covered = [number for number in numbers if number <= low]
            if covered:
                out.append(encode_confirm(self._channel, low, low - self.low > 1, True))
            out += [encode_confirm(self._channel, number, False, True) for number in numbers[len(covered) :]]
        self.low = low

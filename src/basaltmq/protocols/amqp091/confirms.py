"""Publisher confirms: tracks the confirmed messages of a channel, and sends as few acks as possible.

Messages are numbered from 1. All numbers up to `low` are confirmed. An ack that continues from `low` is sent as one
`multiple` ack. It may cover messages that were confirmed out of order before; clients ignore the repetition. Nacks are
sent one by one, before any `multiple` ack that would cover them.
"""

from __future__ import annotations

from collections.abc import Sequence

from basaltmq.protocols.amqp091.outbox import Output, encode_confirm


class Confirms:
    """Confirm state of a channel in confirm mode."""

    __slots__ = ("_ahead", "_channel", "last", "low")

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self.last = 0
        """Number of the last published message."""
        self.low = 0
        self._ahead: set[int] = set()
        """Confirmed numbers above `low`."""

    @property
    def unanswered(self) -> int:
        return self.last - self.low - len(self._ahead)

    def answer(self, numbers: Sequence[int], ok: bool, out: Output) -> None:
        """Confirm or nack messages. Numbers are ascending, and each is passed once."""
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
            # One `multiple` ack covers the contiguous run up to `low`; the rest is acked one by one.
            covered = [number for number in numbers if number <= low]
            if covered:
                out.append(encode_confirm(self._channel, low, low - self.low > 1, True))
            out += [encode_confirm(self._channel, number, False, True) for number in numbers[len(covered) :]]
        self.low = low

"""How much of what was fetched one call hands out.

A lease is for a number of messages, and bodies kept apart are read when they are handed out: a queue whose messages
turn large from one to the next would have hundreds of them in memory. So whoever says how many bytes it wants has
those that fit, and the first in any case.
"""

from __future__ import annotations

from basaltmq.queues.backing import BackingQueue, Entry


def fit(backing: BackingQueue, fetched: list[Entry], room_bytes: int, *, is_first: bool) -> tuple[list[Entry], int]:
    """Those of the fetched messages that fit, and the room left behind them: none if some did not.

    The others go back to their places. With `is_first` the first of them fits whatever its size.
    """
    for number, entry in enumerate(fetched):
        if entry.size_bytes > room_bytes and (number or not is_first):
            backing.put_back(fetched[number:])
            return fetched[:number], 0
        room_bytes = max(0, room_bytes - entry.size_bytes)
    return fetched, room_bytes

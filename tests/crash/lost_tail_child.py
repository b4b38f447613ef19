"""A process that appends to topics until it kills itself, and prints the next offset of each topic.

Arguments: the data directory, the number of batches, the topics.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import basaltmq
from basaltmq.embedded.database import Settings

TOPICS = ("busy", "slow")
SLOW_EVERY = 10
RECORDS = 3
"""Records per append. It returns one position, that of the first."""


def main(path: Path, batches: int, topics: list[str]) -> None:
    db = basaltmq.open(path, settings=Settings(maintenance_interval_s=3600.0))
    following = dict.fromkeys(topics, 0)
    for number in range(batches):
        for topic in topics[: 2 if number % SLOW_EVERY == 0 else 1]:
            positions = db.topic(topic).append([b"%s-%d" % (topic.encode(), number)] * RECORDS)
            following[topic] = positions[-1].offset + RECORDS
    print(*following.values(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

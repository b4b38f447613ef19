"""Basalt: a message broker and message store for Python teams, on RocksDB.

```python
import basaltmq

with basaltmq.open("shop") as db:
    orders = db.topic("orders", partitions=4)
    orders.append(b"one", key=b"customer-1")
    for message in orders.consume("billing", wait=0):
        print(message.partition, message.offset, message.value)
```
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from basaltmq.queues.lifecycle.handler_failure import Reject

if TYPE_CHECKING:
    from basaltmq.embedded.database import Basalt, Settings

__all__ = ["Reject", "open"]
__version__ = "0.1.0"


def open(path: str | os.PathLike[str], *, create: bool = True, settings: Settings | None = None) -> Basalt:  # noqa: A001
    """Open the store at `path` in this process, creating it if it does not exist. Close it, or use a `with` block.

    A store can be open in one process at a time. A second process gets StoreLockedError at once.
    """
    from basaltmq.embedded.database import Basalt

    return Basalt.open(path, create=create, settings=settings)

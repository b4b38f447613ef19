"""The wall clock in milliseconds, which components use unless they get another clock."""

from __future__ import annotations

import time
from typing import Final

NS_PER_MS: Final = 1_000_000


def now_ms() -> int:
    return time.time_ns() // NS_PER_MS

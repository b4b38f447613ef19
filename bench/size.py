"""Sizes of benches: the usual one, or the reduced one of `--quick`."""

from __future__ import annotations

import os
from typing import Final, TypeVar

QUICK: Final = "BASALT_BENCH_QUICK"
"""The environment variable that `--quick` sets, so that programs which a bench starts have the same sizes."""

Number = TypeVar("Number", int, float)


def is_quick() -> bool:
    return bool(os.environ.get(QUICK))


def sized(usual: Number, quick: Number) -> Number:
    return quick if is_quick() else usual

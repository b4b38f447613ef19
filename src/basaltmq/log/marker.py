"""LANE and its copy: the format of a lane, and the seed that every frame check requires.

    | CRC32C of the rest, 8 hex digits | space | JSON: format, version, seed | newline |

There are two files, because losing a single one would make all records unreadable.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

import google_crc32c

from basaltmq.errors import CorruptionError, StoreTooNewError
from basaltmq.log.segment import parse_segment_name

FORMAT: Final = "basalt-lane"
FORMAT_VERSION: Final = 1
MARKERS: Final = ("LANE", "LANE.copy")


def read_seed(path: Path) -> int:
    """Return the seed of an existing lane, for readers next to the writer."""
    seed = find_seed(path)
    if seed is None:
        raise CorruptionError(
            f"{path} is not a lane: {' and '.join(MARKERS)} are missing; restore one of them from a backup"
        )
    return seed


def encode_marker(seed: int) -> bytes:
    body = json.dumps({"format": FORMAT, "version": FORMAT_VERSION, "seed": seed}).encode()
    return b"%08x %s\n" % (google_crc32c.value(body), body)


def find_seed(path: Path) -> int | None:
    """Return the seed from either marker, None if no lane exists."""
    damaged = None
    for name in MARKERS:
        try:
            raw = (path / name).read_bytes()
        except FileNotFoundError:
            continue
        crc, _, body = raw.rstrip(b"\n").partition(b" ")
        if crc != b"%08x" % google_crc32c.value(body):
            damaged = path / name
            continue
        content = json.loads(body or b"{}")
        if content.get("format") != FORMAT:
            # Another sealed file has its name.
            damaged = path / name
            continue
        if content["version"] > FORMAT_VERSION:
            raise StoreTooNewError(
                f"{path} has lane version {content['version']}, but this Basalt reads up to version {FORMAT_VERSION}; "
                "use a newer Basalt"
            )
        return int(content["seed"])
    if damaged is not None:
        raise CorruptionError(f"{damaged} does not match its checksum; restore it from a backup of this store")
    if path.is_dir() and any(parse_segment_name(name) is not None for name in os.listdir(path)):
        raise CorruptionError(f"{path} has segments but neither {MARKERS[0]} nor {MARKERS[1]}; restore one of them")
    return None

"""LANE and its copy: what a lane is, and the seed without which none of its frames can be checked.

    | CRC32C of the rest, 8 hex digits | space | JSON: format, version, seed | newline |

Two files, because one that is damaged would take all records with it.
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
    """The seed of an existing lane, for readers beside the writer."""
    seed = find_seed(path)
    if seed is None:
        raise CorruptionError(f"{path} holds no lane: {' and '.join(MARKERS)} are missing")
    return seed


def encode_marker(seed: int) -> bytes:
    body = json.dumps({"format": FORMAT, "version": FORMAT_VERSION, "seed": seed}).encode()
    return b"%08x %s\n" % (google_crc32c.value(body), body)


def find_seed(path: Path) -> int | None:
    """The seed from either marker; None where no lane has been made."""
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
        said = json.loads(body)
        if said["version"] > FORMAT_VERSION:
            raise StoreTooNewError(
                f"{path} has lane version {said['version']}, this Basalt knows up to {FORMAT_VERSION}: use a newer one"
            )
        return int(said["seed"])
    if damaged is not None:
        raise CorruptionError(f"{damaged} does not match its checksum; restore it from a backup of this store")
    if path.is_dir() and any(parse_segment_name(name) is not None for name in os.listdir(path)):
        raise CorruptionError(f"{path} holds segments but neither {MARKERS[0]} nor {MARKERS[1]}; restore one of them")
    return None

"""An archive job in a separate process, which tests kill: `python -m tests.interop.spark.archive_child JSON`."""

from __future__ import annotations

import json
import sys

from tests.interop.spark.light import LIGHT

from basaltmq.pipeline.archive.archive import ArchiveJob, archive
from basaltmq.pipeline.session import spark_session

if __name__ == "__main__":
    reported = json.loads(sys.argv[1])
    archive(
        spark_session("archive-child", master="local[1]", conf=LIGHT),
        ArchiveJob(
            source={"path": reported["data"], "subscribe": "orders"},
            target=reported["archive"],
            offsets_max=reported["offsets_max"],
        ),
    )

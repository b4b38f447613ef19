"""A replay job in a separate process, which tests kill: `python -m tests.interop.spark.replay_child JSON`."""

from __future__ import annotations

import sys

import msgspec
from tests.interop.spark.light import LIGHT

from basaltmq.pipeline.archive.replay import ReplayJob, replay
from basaltmq.pipeline.session import spark_session

if __name__ == "__main__":
    replay(
        spark_session("replay-child", master="local[1]", conf=LIGHT), msgspec.json.decode(sys.argv[1], type=ReplayJob)
    )

"""The Spark tutorial runs as printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.interop.docs.test_tutorials import BLOCK, SPARK


@pytest.mark.spec("F1")
def test_the_examples_run_as_printed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("basaltmq.pipeline.session.spark_session", lambda name: spark)
    for code in BLOCK.findall(SPARK.read_text()):
        exec(compile(code.replace("spark.stop()\n", ""), SPARK.name, "exec"), {})  # noqa: S102
    assert "1000" in capsys.readouterr().out

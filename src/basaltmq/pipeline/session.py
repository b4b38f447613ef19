"""A Spark session for the jobs, and plain words for what a machine lacks.

A session that is running is used as it is, which is how the same code runs on a cluster. Otherwise one is made on this
machine, on loopback, without a web page, with the Python that runs now. Java, PySpark and PyArrow are looked at before
Spark is started: it would say the same in two hundred lines.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from basaltmq.errors import BasaltError, EnvironmentMissingError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN: Final = 17
PYSPARK_MIN: Final = (4, 2)
PYARROW_MIN: Final = (18, 0)
"""What PySpark 4.x itself asks for."""

JAVA_WAIT_S: Final = 30.0

STDERR: Final = 2
TOLD_MAX: Final = 600
"""Characters of what Java said that are shown."""

_WHY: Final = re.compile(r"error|exception", re.IGNORECASE)

QUERY_LOGGER: Final = "SQLQueryContextLogger"
"""PySpark's own, which prints every error of a query as JSON before it raises it."""


def spark_session(name: str, *, master: str | None = None, conf: dict[str, str] | None = None) -> SparkSession:
    """The running session, or one made for this machine."""
    check_environment()
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    logging.getLogger(QUERY_LOGGER).setLevel(logging.CRITICAL)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName(name).master(master or os.environ.get("SPARK_MASTER", "local[*]"))
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        # What fails is raised; Spark would log it as well, in a hundred lines.
        "spark.log.level": "OFF",
        "spark.sql.streaming.stopTimeout": "60000",
    }
    if (master or "local").startswith("local"):
        settings["spark.driver.host"] = "127.0.0.1"
    for key, value in (settings | (conf or {})).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def quiet_session(name: str, conf: dict[str, str] | None = None) -> SparkSession:
    """As `spark_session`, for a program whose words are for people: what Java says on the way is not shown.

    EnvironmentMissingError, with what Java said last, if there is no session in the end.
    """
    sys.stderr.flush()
    kept = os.dup(STDERR)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), STDERR)
        try:
            return spark_session(name, conf=conf)
        except BasaltError:
            raise
        except Exception as error:
            said.seek(0)
            lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
            why = next((line for line in lines if _WHY.search(line)), lines[-1] if lines else str(error))
            raise EnvironmentMissingError(f"Spark did not start: {why[:TOLD_MAX]}") from error
        finally:
            os.dup2(kept, STDERR)
            os.close(kept)


def check_environment() -> None:
    """EnvironmentMissingError, in one line, if Spark cannot run here."""
    _check_package("pyspark", PYSPARK_MIN)
    _check_package("pyarrow", PYARROW_MIN)
    version = java_version()
    if version is None:
        raise EnvironmentMissingError(
            f"Spark needs Java {JAVA_MIN} and there is none: apt install openjdk-17-jre-headless, or set JAVA_HOME"
        )
    if version < JAVA_MIN:
        raise EnvironmentMissingError(
            f"Spark needs Java {JAVA_MIN} or later and found {version}: install it, or set JAVA_HOME to where it is"
        )


def _check_package(name: str, least: tuple[int, int]) -> None:
    wanted = ".".join(map(str, least))
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise EnvironmentMissingError(f"the pipeline needs {name}: pip install 'basaltmq[spark]'") from None
    numbers = re.findall(r"\d+", version)[:2]
    if tuple(map(int, numbers)) < least:
        raise EnvironmentMissingError(
            f"the pipeline needs {name} {wanted} or later and found {version}: pip install 'basaltmq[spark]'"
        )


def java_version() -> int | None:
    """The feature release of the Java that Spark would take; None if there is none."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        return None
    try:
        told = subprocess.run(  # noqa: S603 the path is the user's own
            [java, "-version"], capture_output=True, text=True, timeout=JAVA_WAIT_S, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', told)
    return int(found[1]) if found else None

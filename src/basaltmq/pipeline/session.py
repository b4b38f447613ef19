"""Creates the Spark session of a job, and checks the prerequisites.

An active session is used as it is, so the same code runs on a cluster. Otherwise a local session is created: loopback
only, without the web UI, with the current Python. Java, PySpark and PyArrow are checked first, because Spark reports a
missing one in about 200 lines.
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

from basaltmq.errors import BasaltError, EnvironmentMissingError, install_hint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN: Final = 17
PYSPARK_MIN: Final = (4, 2)
PYARROW_MIN: Final = (18, 0)
"""Minimum versions that PySpark 4.x requires."""

JAVA_WAIT_S: Final = 30.0

STDERR: Final = 2
OUTPUT_CHARACTERS_MAX: Final = 600
"""Maximum characters of Java's output in an error."""

_ERROR_LINE: Final = re.compile(r"error|exception", re.IGNORECASE)

QUERY_LOGGER: Final = "SQLQueryContextLogger"
"""Logger of PySpark that prints each query error as JSON before it is raised."""


def spark_session(name: str, *, master: str | None = None, conf: dict[str, str] | None = None) -> SparkSession:
    """Return the active session, or create a local one."""
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
        # Errors are raised. Spark would also log them in a hundred lines.
        "spark.log.level": "OFF",
        "spark.sql.streaming.stopTimeout": "60000",
    }
    if (master or "local").startswith("local"):
        settings["spark.driver.host"] = "127.0.0.1"
    for key, value in (settings | (conf or {})).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def quiet_session(name: str, conf: dict[str, str] | None = None) -> SparkSession:
    """Return a session like `spark_session`, without Java's output on stderr.

    Raises EnvironmentMissingError with the relevant line of that output if Spark does not start.
    """
    sys.stderr.flush()
    kept = os.dup(STDERR)
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), STDERR)
        try:
            return spark_session(name, conf=conf)
        except BasaltError:
            raise
        except Exception as error:
            output.seek(0)
            lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
            why = next((line for line in lines if _ERROR_LINE.search(line)), lines[-1] if lines else str(error))
            raise EnvironmentMissingError(f"Spark did not start: {why[:OUTPUT_CHARACTERS_MAX]}") from error
        finally:
            os.dup2(kept, STDERR)
            os.close(kept)


def check_environment() -> None:
    """Raise EnvironmentMissingError if Spark cannot run here."""
    _check_package("pyspark", PYSPARK_MIN)
    _check_package("pyarrow", PYARROW_MIN)
    version = java_version()
    if version is None:
        raise EnvironmentMissingError(
            f"Spark needs Java {JAVA_MIN} but Java is not installed: apt install openjdk-17-jre-headless, "
            "or set JAVA_HOME"
        )
    if version < JAVA_MIN:
        raise EnvironmentMissingError(
            f"Spark needs Java {JAVA_MIN} or later, but found {version}: install it, or set JAVA_HOME"
        )


def _check_package(name: str, least: tuple[int, int]) -> None:
    wanted = ".".join(map(str, least))
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise EnvironmentMissingError(f"the pipeline needs {name}: {install_hint('spark')}") from None
    numbers = re.findall(r"\d+", version)[:2]
    if tuple(map(int, numbers)) < least:
        raise EnvironmentMissingError(
            f"the pipeline needs {name} {wanted} or later, but found {version}: {install_hint('spark')}"
        )


def java_version() -> int | None:
    """Return the major version of the Java that Spark would use, or None."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        return None
    try:
        output = subprocess.run(  # noqa: S603 the path is the user's own
            [java, "-version"], capture_output=True, text=True, timeout=JAVA_WAIT_S, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', output)
    return int(found[1]) if found else None

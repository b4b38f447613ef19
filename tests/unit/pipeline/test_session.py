"""Missing requirements are reported in one line before Spark starts."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from basaltmq.errors import EnvironmentMissingError
from basaltmq.pipeline.session import check_environment, java_version

pytestmark = pytest.mark.spec("F2")


def java(home: Path, reported: str) -> str:
    """Create a fake Java with this version output. Return its home."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{reported}' >&2\n")
    program.chmod(0o755)
    return str(home)


@pytest.mark.parametrize(
    ("reported", "number"),
    [('openjdk version "17.0.9" 2023-10-17', 17), ('java version "1.8.0_392"', 8), ('openjdk version "21" 2023', 21)],
)
def test_every_format_of_the_java_version_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: str, number: int
) -> None:
    monkeypatch.setenv("JAVA_HOME", java(tmp_path, reported))
    assert java_version() == number


def refusal() -> str:
    with pytest.raises(EnvironmentMissingError) as caught:
        check_environment()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_or_old_java_is_reported_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert "needs Java 17 but Java is not installed: apt install" in refusal()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs Java 17 but Java is not installed" in refusal()
    monkeypatch.setenv("JAVA_HOME", java(tmp_path / "old", 'openjdk version "11.0.2"'))
    assert "found 11: install it, or set JAVA_HOME" in refusal()


@pytest.mark.parametrize(("package", "version"), [("pyarrow", "11.0.0"), ("pyspark", "3.5.1")])
def test_missing_or_old_package_is_reported_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == package else real(name))
    assert f"needs {package} " in (reported := refusal())
    assert f"found {version}: pip install 'basaltmq[spark]'" in reported

    def missing(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert f"the pipeline needs {package}: pip install 'basaltmq[spark]'" in refusal()

"""Generates the gRPC messages from `proto/` and the package description; all else is in pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PROTO = ROOT / "proto"
WIRE = ROOT / "src" / "basaltmq" / "wire"
SOURCE_URL = "https://github.com/basaltmq/basalt/blob/main/"


def generate() -> None:
    """Write a module and its types for every proto file."""
    sources = sorted(str(path) for path in PROTO.glob("*.proto"))
    options = [f"--proto_path={PROTO}", f"--python_out={WIRE}", f"--pyi_out={WIRE}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *sources], check=True)


def description() -> str:
    """Return the README for a package index, where relative links and pictures have no target."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\])\((?!https?:|#)([^)]+)\)", rf"\1({SOURCE_URL}\2?raw=true)", text)
    return re.sub(r"(\[[^\]]*\])\((?!https?:|#)([^)]+)\)", rf"\1({SOURCE_URL}\2)", text)


class GenerateAndBuild(build_py):
    """The usual build, with the messages generated first."""

    def run(self) -> None:
        generate()
        super().run()


if __name__ == "__main__":
    setup(
        cmdclass={"build_py": GenerateAndBuild},
        long_description=description(),
        long_description_content_type="text/markdown",
    )

"""Generates the gRPC messages from `proto/` before anything is built; all else is in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PROTO = ROOT / "proto"
WIRE = ROOT / "src" / "basaltmq" / "wire"


def generate() -> None:
    """Write a module and its types for every proto file."""
    sources = sorted(str(path) for path in PROTO.glob("*.proto"))
    options = [f"--proto_path={PROTO}", f"--python_out={WIRE}", f"--pyi_out={WIRE}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *sources], check=True)


class GenerateAndBuild(build_py):
    """The usual build, with the messages generated first."""

    def run(self) -> None:
        generate()
        super().run()


if __name__ == "__main__":
    setup(cmdclass={"build_py": GenerateAndBuild})

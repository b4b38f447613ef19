"""A short description of the machine on which figures were measured."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def machine() -> str:
    """Return cores, model and kernel, without the host name."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    model = found[1].strip() if found else platform.machine()
    kernel = ".".join(platform.release().split(".")[:2])
    return f"{os.cpu_count()} cores, {model}, Linux {kernel}, Python {platform.python_version()}"

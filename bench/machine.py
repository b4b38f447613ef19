"""The machine that figures were taken on, in a few words."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def machine() -> str:
    """Cores, model and kernel, without the name of the host."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    model = found[1].strip() if found else platform.machine()
    kernel = ".".join(platform.release().split(".")[:2])
    return f"{os.cpu_count()} cores, {model}, Linux {kernel}, Python {platform.python_version()}"

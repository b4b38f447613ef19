"""Basalt inside a Python process: `basaltmq.open(path)`."""

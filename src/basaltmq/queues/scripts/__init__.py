"""Lua hooks on enqueue and on failure, their sandbox and their time budget."""

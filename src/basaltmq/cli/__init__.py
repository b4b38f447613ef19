"""The `basalt` command."""

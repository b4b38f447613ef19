"""`basalt serve`: listeners, signals, log, settings."""

"""`basalt topic`: topics of a data directory or a running broker."""

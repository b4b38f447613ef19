"""The engine that stores records in segment files of the log."""

"""Index rebuilds with Spark."""

"""Bulk imports: files staged and appended to topics, exactly once."""

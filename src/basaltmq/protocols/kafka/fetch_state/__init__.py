"""State of fetches: sessions, waits for new records, deadlines, and batches that are read ahead."""

"""Messages that are ready for delivery: in order, by priority, or fair by key; in memory and paged to disk."""

"""What happens to a message between enqueue and removal: limits, delays, expiry, dedup, dead letters, redrive."""

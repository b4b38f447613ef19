"""What happens to messages after they were delivered: jobs on Spark over planes and store, never over the broker."""

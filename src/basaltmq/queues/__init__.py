"""The queue plane: messages, leases and queue configurations, and how they are stored."""

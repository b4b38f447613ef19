"""Sessions and their state: stored rows, messages in both directions, retained messages, shared subscriptions."""

"""Entries of queues: what memory and rows contain of a message. Unreadable rows go to quarantine."""

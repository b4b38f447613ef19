"""Brokers beside each other: the same jobs on Basalt and every installed peer, in turns."""

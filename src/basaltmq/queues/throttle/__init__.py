"""Rate limits by throttle key: token buckets, and messages that wait for tokens."""

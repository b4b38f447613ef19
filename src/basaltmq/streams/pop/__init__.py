"""Groups whose consumers receive records of a topic one by one, each under a lease (POP)."""

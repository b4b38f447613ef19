"""Admin routes for topics, bulk imports and Arrow streams."""

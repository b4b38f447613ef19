"""Administration over HTTP: the API under /api, its documentation, and metrics."""

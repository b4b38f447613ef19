"""The HTTP server of the admin API: requests, routes, authentication, paging."""

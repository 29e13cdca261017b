"""General helpers: exports on first use, options checked by name, threads and locks across forks."""

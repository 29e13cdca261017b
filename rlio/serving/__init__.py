"""A policy behind HTTP: the server, its client, and what they say to each other."""

"""Reading and replaying a data set that others still write, with marks that pace its writers."""

"""A stored data set: names, listing, commit, shards, schemas. It alone decides which rows are live."""

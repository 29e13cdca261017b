"""Which rows of a root are live: names of shards, listings, markers, schema files, and the commit."""

"""A writer's write-ahead log, what publishes its shards, and recovery after a crash."""

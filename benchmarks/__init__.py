"""rlio's speed beside its peers', in one run: ``python -m benchmarks``; docs/performance.md explains it."""

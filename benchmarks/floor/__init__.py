"""One table of how far a run is from the bare loop, or from the least possible: ``python -m benchmarks.floor``."""

"""The rules, by theme. A file here is found by itself: see `toolkit.linting.registry`."""

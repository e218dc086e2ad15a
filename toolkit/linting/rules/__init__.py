"""The rules, by topic. Files are found automatically: see `toolkit.linting.registry`."""

"""Reads the keys out of the installed packages into toolkit/linting/keys/*.json: `python -m tools.lint_keys`."""

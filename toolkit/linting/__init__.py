"""Checking the configuration files that people already have, before any model loads."""

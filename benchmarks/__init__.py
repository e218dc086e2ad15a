"""Measurements that are no part of the package: what ran, on what, by which command."""

"""Predictions of `plan` held against GPU measurements that others published: ``python -m benchmarks.outside FILE``."""

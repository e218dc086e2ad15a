"""Measures recipes on this machine, interleaved with each other."""

"""Readers of the three packages' configuration files: plain values, and where each one stands."""

"""Readers of the packages' configuration files: plain values and their positions."""

"""Checks existing configuration files, before any model is loaded."""

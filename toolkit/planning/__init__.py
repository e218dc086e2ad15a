"""Predicts memory and time before anything runs."""

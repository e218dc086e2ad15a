"""Measured cells: what a recipe really takes here, against others in turns."""

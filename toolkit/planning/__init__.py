"""What fits and how fast, before anything runs."""

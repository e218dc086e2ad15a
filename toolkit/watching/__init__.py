"""`toolkit watch`, and what Studio shows of a run: read from the run's folder, never in the run's way."""

"""What a run under verification leaves behind: traces, written by its ranks."""

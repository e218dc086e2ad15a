"""`toolkit export --format`: a checkpoint as another tool's, from which its run continues."""

"""`toolkit import`: a recipe from another tool's configuration, with what became of every key."""

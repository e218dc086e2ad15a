"""`toolkit verify --checkpoint A --checkpoint B`: two checkpoints compared by name, stage and step."""

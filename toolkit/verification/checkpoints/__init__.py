"""`toolkit compare A B`: two checkpoints compared by name, stage and step."""

"""One file per format: each gives a ``Checkpoint`` whose tensors are read when they are compared."""

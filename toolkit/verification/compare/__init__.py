"""A trace against the plain PyTorch loop, stage by stage."""

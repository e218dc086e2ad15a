"""From a difference to its likely cause."""

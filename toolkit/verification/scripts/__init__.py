"""Any training command, recorded as it runs and verified from what was recorded. Not a line of its script changes."""

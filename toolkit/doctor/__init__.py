"""What is installed here, which devices there are, what will not work and what to do about it."""

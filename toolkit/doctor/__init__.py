"""Lists what is installed, the devices, what will not work, and what to do about it."""

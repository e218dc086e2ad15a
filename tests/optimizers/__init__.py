"""Every optimizer under every strategy, verified."""

"""Training loops of others: recorded where they run, verified from their traces."""

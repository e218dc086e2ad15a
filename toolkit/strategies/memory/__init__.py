"""Memory models: what each strategy stores on a device in addition to activations."""

"""A training script in Python, read without running it: its calls (`source.py`), the values of their arguments
(`values.py`), and what they say of the training, under the names of the Trainer's arguments (`settings.py`)."""

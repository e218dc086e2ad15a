"""One recipe, every strategy: fine-tuning runs proven equal to a plain PyTorch loop."""

__version__ = "0.1.0"

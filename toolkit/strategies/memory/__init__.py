"""What each strategy keeps on a device besides activations: the answer to «what memory do you take»."""

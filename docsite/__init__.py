"""What the documentation site shows that is read from the code: commands, rules, faults, messages."""

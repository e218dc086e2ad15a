"""`toolkit import-checkpoint`: another tool's checkpoint as one that `toolkit train --resume` continues."""

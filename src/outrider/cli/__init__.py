"""The command line: `main.py` has the commands, heavy modules load inside them."""

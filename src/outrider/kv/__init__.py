"""Pages of the key-value cache: the account of them (no torch), and the tensors they live in."""

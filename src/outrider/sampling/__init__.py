"""Noise, the target distribution, and the two acceptance rules. `SamplingOps` is the way in."""

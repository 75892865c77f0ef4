"""Models behind one contract, `base.Backend`."""

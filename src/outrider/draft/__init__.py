"""Drafters behind one contract, `base.Drafter`. None knows another."""

"""Drafts made for a target: `outrider train eagle`."""

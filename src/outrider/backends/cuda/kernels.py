"""The Triton kernels of a pass. Each has a twin in plain torch (`twins.py`) with the same name and arguments."""

from outrider.backends.cuda.attending import advance, attend, turn_and_store
from outrider.backends.cuda.products import gated_product, normed, product

__all__ = ["advance", "attend", "gated_product", "normed", "product", "turn_and_store"]

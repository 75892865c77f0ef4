"""Transformers on a GPU: our own kernels for a few rows, CUDA graphs, paged attention with chains and trees."""

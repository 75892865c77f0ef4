"""Kernels in C++ for quantised weights on a CPU: one shared library with a plain C interface, built at installation."""

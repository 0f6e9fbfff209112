"""Reduction, clipping and application of gradients, synchronously or lock-free."""

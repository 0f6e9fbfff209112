"""Tensors of torch, and elements of them in pages: storage, autograd graphs, reads and writes a page at a time."""

"""Helpers for torch tensors and for their elements in pages: storage, autograd graphs, page-wise reads and writes."""

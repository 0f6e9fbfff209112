"""Hooks on modules and autograd: forwards, backward passes, saved tensors, recomputation."""

"""When gradients are reduced, clipped and applied: synchronously or lock-free."""

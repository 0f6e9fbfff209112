"""Pages over device, host and disk memory, and the Allocator that owns them (the paper's sections 4.1 and 5)."""

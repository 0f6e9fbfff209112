"""Gradients of flats: in `.grad`, in pages, and accumulated in RAM."""

"""Gradients of flats: in `.grad`, in pages, and added up in RAM."""

"""Gradients of flats: their state, their pages, and what `.grad` shows."""

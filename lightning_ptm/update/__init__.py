"""Optimizer updates: the user's optimizer runs page by page on master states in their home tier."""

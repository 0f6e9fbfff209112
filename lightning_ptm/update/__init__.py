"""The update: the user's optimizer, run page by page where the master states live."""

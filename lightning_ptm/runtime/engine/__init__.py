"""The engine of a run, and how it is built."""

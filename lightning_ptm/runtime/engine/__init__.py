"""Engine of a run: its parts, their set-up, and what can be read from it."""

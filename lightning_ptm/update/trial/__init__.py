"""The trial of an optimizer before a run: whether pages can hold its states, and how its update may be cut."""

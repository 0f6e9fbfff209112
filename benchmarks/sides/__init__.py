"""Kinds of sides. Each module has `run(options, baton)`, which returns when the race is over."""

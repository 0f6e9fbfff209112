"""Shared code of tests: models, fits, comparison with a plain Trainer, and which cases are quick."""

"""Shared code of tests with several ranks: processes of ranks, their models and trainings, comparison with DDP."""

"""What tests of several ranks share: processes of ranks, their models and trainings, comparison with DDP."""

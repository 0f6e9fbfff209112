"""What `lightning-ptm plan` computes: seconds and bytes of a run that has not begun."""

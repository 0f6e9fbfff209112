"""Checkpoints as Lightning saves and restores them, and first weights from files of other programs."""

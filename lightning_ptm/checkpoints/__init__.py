"""Checkpoints as Lightning writes and restores them, and weights from other people's files."""

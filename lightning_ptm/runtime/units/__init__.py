"""Units and their parameters in pages: discovery of units, shards, gathered storage, and the guard against reads."""

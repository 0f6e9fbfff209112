"""What Lightning's Trainer calls: the strategy, its precision plugin, and what they put in place for a run."""

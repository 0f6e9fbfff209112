"""Lightning's side of the engine: the strategy, its precision plugin, and the hooks that a run installs."""

"""One module for each kind of side. Each has `run(options, baton)`, which returns when the race is over."""

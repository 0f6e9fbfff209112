"""Model states of an engine that has ended, for the pages of the next one."""

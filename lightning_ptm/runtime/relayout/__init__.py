"""Where the elements of flats are; model states of an engine that has ended, moved to the pages of the next one."""

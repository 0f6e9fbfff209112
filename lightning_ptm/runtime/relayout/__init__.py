"""Model states of an engine that has ended, moved to the pages of the next one; maps of the elements of flats."""

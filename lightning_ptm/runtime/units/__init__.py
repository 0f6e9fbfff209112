"""Parameters of units in pages: which modules form a unit, their shards, their gathered storage and who may read it."""

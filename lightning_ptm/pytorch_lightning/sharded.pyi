"""For type checkers, which cannot find the module: its files are those of lightning_ptm.sharded."""

from typing import Any

def __getattr__(name: str) -> Any: ...

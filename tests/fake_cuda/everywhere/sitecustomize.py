"""Hook of Python's start: gives all processes with this folder in PYTHONPATH, and those that they start, the fake
device of the folder above, which has to be in PYTHONPATH, too.

Where `MUTATIONS_REMOVED` names a path and what is left, processes import that file without what `mutations.py` removes.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
from typing import Any


def leave_out(path: str, left: str) -> None:
    """From now on this process imports a file so."""
    get_code = importlib.machinery.SourceFileLoader.get_code

    def without(self: Any, fullname: str) -> Any:
        return compile(left, path, "exec") if self.path == path else get_code(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = without  # type: ignore[method-assign]


if "MUTATIONS_REMOVED" in os.environ:
    leave_out(*json.loads(os.environ["MUTATIONS_REMOVED"]))
else:
    import fake_device  # noqa: F401

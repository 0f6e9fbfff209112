"""The process of one side: enters its memory control group, imports the side's module, and runs it.

Started by `race.py` only: `worker.py MODULE OPTIONS_JSON ORDERS_FD REPORTS_FD MEMORY_GROUP`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from race import Baton


def main() -> int:
    """Run the side named on the command line; what it raises goes to the race, too."""
    module, options, orders_fd, reports_fd, memory_group = sys.argv[1:]
    if memory_group:  # before torch is imported, so that all it takes is counted
        (Path(memory_group) / "cgroup.procs").write_text(str(os.getpid()))
    sys.argv = sys.argv[:1]
    baton = Baton(os.fdopen(int(orders_fd)), os.fdopen(int(reports_fd), "w"))
    try:
        importlib.import_module(f"sides.{module}").run(json.loads(options), baton)
    except BaseException:
        baton.fail()
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())

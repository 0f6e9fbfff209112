"""The process of one side: enters its memory control group, imports the side's module, and runs it.

Started by `race.py` only: `python -P worker.py MODULE OPTIONS_JSON ORDERS_FD REPORTS_FD MEMORY_GROUP`. It may run in the
environment of another version of this project, or in one that has only torch and DeepSpeed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path


def import_benchmarks() -> None:
    """Makes `benchmarks` importable without its parent folder in sys.path, where this checkout's lightning_ptm would be found
    in place of the one that is installed in this environment."""
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = package
    spec.loader.exec_module(package)


def main() -> int:
    """Runs the side named on the command line; what it raises goes to the race, too."""
    module, options, orders_fd, reports_fd, memory_group = sys.argv[1:]
    if memory_group:  # before torch is imported, so that all it takes is counted
        (Path(memory_group) / "cgroup.procs").write_text(str(os.getpid()))
    sys.argv = sys.argv[:1]
    import_benchmarks()
    from benchmarks.race import Baton, end_with_parent

    end_with_parent(signal.SIGKILL)
    baton = Baton(os.fdopen(int(orders_fd)), os.fdopen(int(reports_fd), "w"))
    try:
        importlib.import_module(f"benchmarks.sides.{module}").run(json.loads(options), baton)
    except BaseException:
        baton.fail()
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())

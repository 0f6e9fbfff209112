"""A simulated step as a trace for chrome://tracing and ui.perfetto.dev: one row for compute and one for each link."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lightning_ptm.errors import ConfigError
from lightning_ptm.forecasting.rates import Activity
from lightning_ptm.terms import Link


def check_timeline(path: Path) -> None:
    """Refuses a path to which no timeline can be written, before anything is computed.

    Raises:
        ConfigError: its folder does not exist, or it is a folder itself.
    """
    if not path.parent.is_dir():
        raise ConfigError(
            f"timeline is {str(path)!r}, and there is no folder {str(path.parent)!r}; make it, or name another file"
        )
    if path.is_dir():
        raise ConfigError(f"timeline is {str(path)!r}, which is a folder; name a file in it")


def write_timeline(path: Path, activities: Sequence[Activity], units: Sequence[str]) -> None:
    """Writes Trace Event Format, in microseconds. Times count from the step's start, or from the first activity that began
    before it: Perfetto drops events with negative times. If the two differ, an instant event marks the start.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows: list[Link | None] = [None, *Link]
    first_s = min([0.0, *(done.start_s for done in activities)])
    # Perfetto takes process and thread 0 for the idle one.
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "one rank, planned"}}
    ]
    for row, link in enumerate(rows, start=1):
        thread: dict[str, object] = {"ph": "M", "pid": 1, "tid": row}
        name = "compute" if link is None else link.value.replace("_", " ")
        events.append(thread | {"name": "thread_name", "args": {"name": name}})
        events.append(thread | {"name": "thread_sort_index", "args": {"sort_index": row}})
    if first_s < 0:
        events.append({"ph": "i", "s": "p", "name": "the step begins", "pid": 1, "tid": 1, "ts": -first_s * 1e6})
    for done in activities:
        events.append(
            {
                "ph": "X",
                "name": f"{done.operation.value} {units[done.unit]}",
                "cat": done.operation.value,
                "pid": 1,
                "tid": rows.index(done.link) + 1,
                "ts": (done.start_s - first_s) * 1e6,
                "dur": done.seconds * 1e6,
                "args": {"bytes": done.bytes},
            }
        )
    try:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise ConfigError(f"the timeline cannot be written to {path} ({error}); name another file") from error

"""A simulated step as chrome://tracing and ui.perfetto.dev read it: one row for compute and one for each link."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.timing import Activity, Link


def write_timeline(path: Path, activities: Sequence[Activity], units: Sequence[str]) -> None:
    """Writes Trace Event Format; microseconds from the start of the step. What began before it has negative times.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows: list[Link | None] = [None, *Link]
    events: list[dict[str, object]] = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 0,
            "tid": row,
            "args": {"name": "compute" if link is None else link.value},
        }
        for row, link in enumerate(rows)
    ]
    for done in activities:
        events.append(
            {
                "ph": "X",
                "name": f"{done.operation.value} {units[done.unit]}",
                "cat": done.operation.value,
                "pid": 0,
                "tid": rows.index(done.link),
                "ts": done.start_s * 1e6,
                "dur": done.seconds * 1e6,
                "args": {"bytes": done.bytes},
            }
        )
    try:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise ConfigError(f"the timeline cannot be written to {path} ({error}); name another file") from error

"""Callback that writes a timeline of a few batches as a file for ui.perfetto.dev.

Owns only the file; the events come from the recorder. The format is Chrome's trace event format: complete events ("X", in
microseconds) on a thread for each track, and counters ("C") of the bytes in each tier.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer

from lightning_ptm import Event, EventKind

from .recorder import Batch, Recorder
from .where import file_of, pages_of

TITLES = {
    EventKind.TICK: "compute",
    EventKind.STALL: "stall",
    EventKind.UPDATE: "update",
    EventKind.COPY: "copy",
    EventKind.COLLECTIVE: "collective",
}
"""Titles of tracks, in the order in which they are shown."""

_FLAT = re.compile(r"(?:flat |\d+/)(?P<flat>\d+)[ /](?P<what>.+)")


class PerfettoTrace(Recorder):
    """Writes `perfetto_trace.json` into the logger's folder (without a logger, into `lightning_ptm_logs` in the
    Trainer's root folder): ticks of compute, stalls, arithmetic of updates, copies by link, collectives, and bytes in each
    tier, for a few batches. Open it in https://ui.perfetto.dev.

    The events are those of rank 0 (`AngelPTMStrategy.trace_events` defines their begins and ends; on CUDA, compute and
    updates are shown while they are launched). Overlapping copies of one link are shown on several tracks. Does nothing
    with other strategies, or outside of those batches. A Trainer's second PerfettoTrace writes `perfetto_trace_2.json`; in
    validate, test and predict file names end in `_<loop>` (`perfetto_trace_test.json`). `fast_dev_run` writes nothing.

    Args:
        start: number of the first batch, from 0; the first two are traced and planned again.
        count: how many batches.
    """

    def __init__(self, start: int = 2, count: int = 3) -> None:
        super().__init__(start, count)

    def recorded(self, trainer: Trainer, events: list[Event], batches: list[Batch]) -> None:
        strategy = pages_of(trainer)
        names = strategy.flat_names() if strategy is not None else {}
        tiers = strategy.tier_names() if strategy is not None else ()
        path = file_of(trainer, self, "perfetto_trace.json")
        if path is not None:
            path.write_text(json.dumps(chrome_trace(events, batches, names, tiers)))


def chrome_trace(
    events: list[Event], batches: list[Batch], names: Mapping[int, str], tiers: Sequence[str] = ()
) -> dict[str, Any]:
    """The events in Chrome's format; times count from the first begin.

    Args:
        names: of units, by the numbers of their flats.
        tiers: names of the tiers in `Event.tier_bytes`.
    """
    origin_s = min([event.begin_s for event in events] + [batch.begin_s for batch in batches])

    def us(moment_s: float) -> float:
        return round((moment_s - origin_s) * 1e6, 3)

    # Perfetto takes process and thread 0 for the idle one.
    rows: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "rank 0"}}]
    threads = 1

    def track(title: str, spans: list[tuple[float, float, str, dict[str, Any]]]) -> None:
        """Spans on as few threads as keep overlapping ones apart, since a viewer shows overlapping spans as nested."""
        nonlocal threads
        free_from_s: list[float] = []
        for begin_s, end_s, name, details in sorted(spans, key=lambda span: span[:2]):
            lane = next((lane for lane, free_s in enumerate(free_from_s) if free_s <= begin_s), len(free_from_s))
            if lane == len(free_from_s):
                free_from_s.append(end_s)
                number = {"ph": "M", "pid": 1, "tid": threads + lane}
                rows.append(
                    number | {"name": "thread_name", "args": {"name": title if lane == 0 else f"{title} ({lane + 1})"}}
                )
                rows.append(number | {"name": "thread_sort_index", "args": {"sort_index": threads + lane}})
            free_from_s[lane] = end_s
            place = {"ph": "X", "pid": 1, "tid": threads + lane, "name": name, "args": details}
            rows.append(place | {"ts": us(begin_s), "dur": round((end_s - begin_s) * 1e6, 3)})
        threads += len(free_from_s)

    track("batch", [(batch.begin_s, batch.end_s, f"batch {batch.number}", {}) for batch in batches])
    for kind, title in TITLES.items():
        of_kind = [event for event in events if event.kind is kind]
        for name in sorted({event.track for event in of_kind}):
            spans = [(e.begin_s, e.end_s, _name(e, names), _details(e)) for e in of_kind if e.track == name]
            track(f"{title} {name}", spans)
    for event in events:
        for tier, used in zip(tiers, event.tier_bytes, strict=False):
            counter = {"ph": "C", "pid": 1, "name": f"{tier} pages, MB", "ts": us(event.begin_s)}
            rows.append(counter | {"args": {"MB": used / 1e6}})
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _name(event: Event, names: Mapping[int, str]) -> str:
    """An event's name with the unit's name in place of numbers: `blocks.3/master`, not `4/4/master`."""
    found = _FLAT.match(event.name)
    if found is None or int(found["flat"]) not in names:
        return event.name
    return f"{names[int(found['flat'])]}/{found['what']}"


def _details(event: Event) -> dict[str, Any]:
    if event.kind is EventKind.TICK:
        return {"tick": event.index}
    return {"bytes": event.bytes} if event.bytes else {}

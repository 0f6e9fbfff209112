"""Cases of sharded checkpoints: how near to the disk's own speed, and with how much memory?

Sides, each writing weights and optimizer states while nothing trains:
  ours     AngelPTMStrategy, everything in RAM (sides/saver.py)
  on disk  the same with master states on disk: all that is written is first read from the same disk
  write    as many bytes written to a new file in order, past the page cache, by as many threads as are fastest on this disk,
           and synced (sides/writer.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from benchmarks.case import MIB, Case, Figure, Scores, Setup, of_gpt
from benchmarks.race import Score, Side

BYTES_PER_PARAMETER = 12  # an fp32 parameter and two moments
ADDED_LIMIT_BYTES = 200 * 10**6
TITLES = {"ours": "", "on disk": ", masters on disk"}


def _sides(setup: Setup) -> Sequence[Side]:
    shape = setup.shape("355M")
    settings = {"checkpoints": {"state_dict_type": "sharded"}}
    homes: dict[str, dict[str, object]] = {
        "ours": {},
        "on disk": {"disk_path": str(setup.folder), "offload_optimizer": "disk"},
    }
    made = []
    for name, home in homes.items():
        options = {**of_gpt(shape, batch=1), "meta": True, "folder": setup.subfolder(name.replace(" ", "_"))}
        made.append(replace(setup.ours(options, settings | home, name=name), module="saver"))
    alone = {"folder": str(setup.folder), "block_bytes": 4 * MIB, "file_bytes": BYTES_PER_PARAMETER * shape.numel}
    return [*made, Side("write", "writer", alone)]


def _rate(score: Score) -> float:
    return median(turn.extra["saved_bytes"] / turn.step_s for turn in score.turns) / 1e9


def _figures(scores: Scores) -> Sequence[Figure]:
    found = []
    for name, title in TITLES.items():
        if not {name, "write"} <= scores.keys():
            continue
        mine, disk = _rate(scores[name]), _rate(scores["write"])
        found.append(Figure(f"bytes/s over sequential writes{title}", mine, "GB/s", disk, mine / disk, 0.85))
        added: float = max(turn.extra["added_bytes"] for turn in scores[name].turns)
        ratio = added / ADDED_LIMIT_BYTES
        what = f"memory added over 200 MB{title}"
        found.append(Figure(what, added / MIB, "MiB", ADDED_LIMIT_BYTES / MIB, ratio, 1.0, at_least=False))
    return found


CASES = (
    Case(
        id="checkpoints-355M",
        what="GPT 355M, a sharded checkpoint of 4.2 GB",
        sides=_sides,
        figures=_figures,
        steps=1,
        warmup=1,
    ),
)

"""Cases of lock-free updates: how much faster than synchronous ones, and at which loss?

Sides of `lock_free`, with master states on disk and few tokens a step, on the same text; both take the same number of steps:
  ours         AngelPTMStrategy(lock_free=LockFree(max_staleness=16))
  synchronous  the same without lock_free: updates behind the backward pass and the next forward
  compute      forward and backward of the bf16 model alone, no optimizer, freed memory kept as by ours (sides/plain.py)
A turn begins with steps that do not count for the time, so that updates are in full course when the clock starts. The
loss is the mean training loss of all steps of the last turn: of steps 49 to 68.

Sides of `lock_free_loss`, whole trainings of a config: `ours`, on a disk that is slowed down so that an update takes a few
steps' time, and `synchronous`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean, median

from benchmarks.case import KEEP_FREED_MEMORY, SEED, Case, Figure, Scores, Setup, of_gpt, step
from benchmarks.cases.disk import page_speed
from benchmarks.race import Side

MAX_STALENESS = 16
PAPERS_SPEED_UP = 2.96
STEPS, BEFORE, WARM_UP, REPEATS = 12, 8, 8, 3
"""68 steps in all, by both sides: the same number with any speed, since their losses are compared."""
LONGER_THAN_COMPUTE = 3
"""How many times as many steps a turn has: a pass of updates goes on for several of these sides' steps."""


def _sides(tokens: int, names: Sequence[str], *, spare_core: bool) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        threads = max(1, setup.cores - 1) if spare_core else setup.cores
        options = {**of_gpt(setup.shape("124M", sequence=tokens), batch=1), "text": True}
        settings = {"offload_optimizer": "disk", "tuning": {"freed_memory": "keep"}}
        lock_free = {"lock_free": {"max_staleness": MAX_STALENESS}}
        made = []
        for name in names:
            if name == "compute":
                made.append(replace(setup.compute(options, threads=threads), environment=KEEP_FREED_MEMORY))
                continue
            mine = settings | {"disk_path": setup.subfolder(name)} | (lock_free if name == "ours" else {})
            made.append(setup.ours(options, mine, name=name, threads=threads))
        return made

    return make


def _figures(scores: Scores) -> Sequence[Figure]:
    if "ours" not in scores:
        return []
    mine = scores["ours"]
    stream = median(page_speed(turn) for turn in mine.turns)
    print(f"the updates' stream beside compute: {stream / 1e9:.2f} GB/s")
    found = [Figure("mean staleness", mine.extra("mean_staleness"), "steps")]
    if "synchronous" in scores:
        waiting = scores["synchronous"]
        ratio = waiting.step_s / mine.step_s
        losses = [score.turns[-1].extra["mean_loss"] for score in (mine, waiting)]
        found += [
            Figure("speed over synchronous", mine.step_s, "s", waiting.step_s, ratio, PAPERS_SPEED_UP),
            Figure("loss over synchronous", losses[0], "nats", losses[1], losses[0] / losses[1], 1.01, at_least=False),
        ]
    return [*found, *step(scores, "compute", limit=1.25, name="step over compute alone")]


def _case(name: str, tokens: int, what: str, names: Sequence[str], *, spare_core: bool = False) -> Case:
    alone = "compute" in names
    return Case(
        id=name,
        what=f"GPT 124M, masters on disk, {what}",
        sides=_sides(tokens, names, spare_core=spare_core),
        figures=_figures,
        tokens_per_step=tokens,
        repeats=REPEATS,
        steps=8 if alone else STEPS,
        warmup=WARM_UP,
        before={"ours": BEFORE, "compute": 1} if alone else {"ours": BEFORE, "synchronous": BEFORE},
        longer={"ours": 5, "compute": LONGER_THAN_COMPUTE} if alone else {},
        limit_s=math.inf,  # losses are compared after the same number of steps
    )


# --- Loss ----------------------------------------------------------------------------------------------------------------


def _trainings(disk_bytes_per_s: float, *, seed: int = SEED, **lock_free: object) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        common = {"config": "gpt", "seed": seed, "train_steps": 6 if setup.quick else 300}
        sides = []
        for name in ("ours", "synchronous"):
            settings: dict[str, object] = {"disk_path": setup.subfolder(name), "offload_optimizer": "disk"}
            options: dict[str, object] = {**common, "settings": settings}
            if name == "ours":
                settings["lock_free"] = lock_free
                options["disk_bytes_per_s"] = disk_bytes_per_s
            sides.append(Side(name, "main_job", options, threads=setup.cores))
        return sides

    return make


def _loss_figures(scores: Scores) -> Sequence[Figure]:
    if not {"ours", "synchronous"} <= scores.keys():
        return []
    mine, theirs = ([turn.loss for turn in scores[name].turns] for name in ("ours", "synchronous"))
    ratio = mean(ours / other for ours, other in zip(mine, theirs, strict=True))
    return [
        Figure("validation loss over synchronous", mean(mine), "nats", mean(theirs), ratio, 1.01, at_least=False),
        Figure("mean staleness", scores["ours"].extra("mean_staleness"), "steps"),
    ]


def _loss_case(name: str, what: str, sides: Callable[[Setup], Sequence[Side]], seeds: int = 3) -> Case:
    return Case(
        id=name,
        what=f"main job (configs/gpt.yaml), 300 steps, masters on disk, {what}",
        sides=sides,
        figures=_loss_figures,
        tokens_per_step=16 * 256,
        repeats=seeds,
        steps=1,
        warmup=0,
        limit_s=math.inf,
    )


BOTH = ("ours", "synchronous")
AT_MOST = "lock-free updates (at most 16 steps late)"

CASES = (
    _case("lock_free-64", 64, AT_MOST, BOTH),
    _case("lock_free-256", 256, AT_MOST, BOTH),
    _case("lock_free-64-spare_core", 64, f"{AT_MOST}, a core to spare for updates", BOTH, spare_core=True),
    _case("lock_free-256-spare_core", 256, f"{AT_MOST}, a core to spare for updates", BOTH, spare_core=True),
    _case("lock_free-64-compute", 64, AT_MOST, ("ours", "compute")),
    *(
        _loss_case(
            f"lock_free_loss-{rate}MB",
            f"a disk of {rate} MB/s, lock-free updates (at most 2 steps late)",
            _trainings(rate * 1e6, max_staleness=2),
        )
        for rate in (160, 140, 100)
    ),
    _loss_case(
        "lock_free_loss-no_prediction",
        "a disk of 100 MB/s, lock-free updates (at most 1 step late), predict_weights=False",
        _trainings(100e6, max_staleness=1, predict_weights=False),
        seeds=1,
    ),
)

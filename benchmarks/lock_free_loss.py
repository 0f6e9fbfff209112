"""Lock-free against synchronous updates on the main job, or on a small T5 with experts (`--job t5_moe`): same seed, text and
steps; what does staleness cost in loss?

The disk is slowed down to `--disk-mb-per-s`, so that an update takes a few steps' time and
staleness really occurs. Prints the final validation loss of each run and, for lock-free ones, the mean (behind a warm-up) and
the largest staleness. Bar: the mean over seeds of lock-free loss over synchronous loss, at most 1.01 at a mean staleness of
1 to 4, 1.03 beyond.

`--rules` also tries other ways to apply the gradients of several steps in one update. The one that is used is "each"
(lightning_ptm/update/lock_free_buffers.py): a step for each, with the mean gradient; of more than two steps, once
there have been ten,
those of Adam and AdamW in one call that comes near them (update/merged_steps.py). "each-apart" always takes them one
by one. The
others take a single step: with the mean or sum of gradients, and the sum, mean or newest of learning rates.
`--no-forecast` lets compute use parameters as they are, and `--staleness-warmup` is `staleness_warmup`.

The column "of > 2" tells which share of all gradients was applied in updates of more than two steps, which is what "each" and
"each-apart" do differently. With `--max-staleness 2` it is next to nothing, and a run then tells about forecasts; for the
single call give the disk less and staleness more room: `--rules each,each-apart --max-staleness 8 --disk-mb-per-s 30`.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from common import SEED, Bar, argument_parser, disk_folder, publish, quicken, show_table
from main_job import main_job
from race import Score
from slow_disk import SlowDisks

from lightning_ptm import AngelPTMStrategy, LockFree
from lightning_ptm.planning.version_policy import REACH
from lightning_ptm.update import buffering_thread, update_job
from lightning_ptm.update.gradient_source import Transform
from lightning_ptm.update.lock_free_buffers import Contribution
from lightning_ptm.update.shadow import GroupValues

LIMIT, FAR_LIMIT = 1.01, 1.03
LEAST_STALENESS, FAR_STALENESS = 1.0, 4.0

OURS = "each"
APART = "each-apart"

Rule = Callable[[Contribution], tuple[tuple[GroupValues, ...], Transform]]


def rule(gradients: str, rates: str) -> Rule:
    """Another `combined`: "mean" or "sum" of gradients; "sum", "mean" or "newest" of learning rates."""

    def combine(contribution: Contribution) -> tuple[tuple[GroupValues, ...], Transform]:
        origins = contribution.origins
        if len(origins) < 2:
            return tuple(origin.hyper for origin in origins), contribution.transform
        groups = []
        for index, newest in enumerate(origins[-1].hyper.groups):
            each = [origin.hyper.groups[index]["lr"] for origin in origins]
            lr = {"sum": sum(each), "mean": sum(each) / len(each), "newest": each[-1]}[rates]
            groups.append({**newest, "lr": lr})
        share = 1 / len(origins) if gradients == "mean" else 1.0
        return (GroupValues(tuple(groups)),), dataclasses.replace(contribution.transform, share=share)

    return combine


RULES = {
    f"{gradients}-{rates}": rule(gradients, rates)
    for gradients in ("mean", "sum")
    for rates in ("sum", "mean", "newest")
}


class Counted:
    """A `combined` that counts gradients by the number of steps in their update."""

    def __init__(self, combine: Rule) -> None:
        self._combine = combine
        self.gradients: Counter[int] = Counter()

    def __call__(self, contribution: Contribution) -> tuple[tuple[GroupValues, ...], Transform]:
        steps = len(contribution.origins)
        self.gradients[steps] += steps
        return self._combine(contribution)

    @property
    def behind(self) -> float:
        """Share of gradients in updates of more steps than are forecast."""
        total = self.gradients.total()
        return sum(count for steps, count in self.gradients.items() if steps > REACH) / total if total else 0.0


@dataclasses.dataclass(frozen=True)
class Run:
    """How one training ended."""

    name: str
    seed: int
    loss: float
    mean_staleness: float
    max_staleness: int
    updates_per_step: float
    behind: float
    seconds: float


def train(name: str, seed: int, args: argparse.Namespace, folder: Path, rule_name: str | None) -> Run:
    """The main job with other settings of the strategy."""
    lock_free = rule_name is not None
    asked = LockFree(
        max_staleness=args.max_staleness, warmup_steps=args.staleness_warmup, predict_weights=not args.no_forecast
    )
    settings = {"disk_path": folder, "offload_optimizer": "disk", "lock_free": asked if lock_free else False}
    original, merge = buffering_thread.combined, update_job.merge
    counted = Counted(RULES.get(rule_name or OURS, original))
    buffering_thread.combined = counted
    if rule_name == APART:
        update_job.merge = _never
    try:
        with tempfile.TemporaryDirectory() as runs:
            cli = main_job(seed, args.train_steps, Path(runs), settings, args.job)
            strategy = cli.trainer.strategy
            assert isinstance(strategy, AngelPTMStrategy)
            if lock_free:
                strategy.file_ops = SlowDisks(args.disk_mb_per_s * 1e6)
            last: list[Any] = []
            cli.model.on_train_end = lambda: last.append(strategy.statistics())  # type: ignore[method-assign]
            started = time.perf_counter()
            cli.trainer.fit(cli.model, datamodule=cli.datamodule)
            seconds = time.perf_counter() - started
    finally:
        buffering_thread.combined, update_job.merge = original, merge
    staleness = last[0].staleness
    stale_steps = args.train_steps - args.staleness_warmup
    run = Run(
        name,
        seed,
        float(cli.trainer.callback_metrics["val_loss"]),
        # Of the steps behind the warm-up, which has none.
        staleness.mean * args.train_steps / stale_steps if staleness and stale_steps > 0 else 0.0,
        staleness.maximum if staleness else 0,
        last[0].updates_per_step,
        counted.behind,
        seconds,
    )
    print(run, flush=True)
    return run


def _never(*_: object) -> None:
    """In the place of `merge`: no steps are taken in one call."""


def main() -> None:
    """Train, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--job", choices=("gpt", "t5_moe"), default="gpt", help="which of the configs is trained")
    parser.add_argument("--train-steps", type=int, default=300, help="optimizer steps of each training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind")
    parser.add_argument("--first-seed", type=int, default=SEED)
    parser.add_argument("--disk-mb-per-s", type=float, default=100.0, help="bandwidth of the slowed disk")
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--no-forecast", action="store_true", help="compute uses parameters as they are")
    parser.add_argument("--staleness-warmup", type=int, default=0, help="steps that wait for their updates, before")
    parser.add_argument("--rules", default=OURS, help=f"by comma, of {', '.join((OURS, APART, *RULES))}")
    args = quicken(parser.parse_args())
    if args.quick:
        args.train_steps, args.seeds = 6, 1
    runs: list[Run] = []
    with disk_folder(args.disk_path) as folder:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            runs.append(train("synchronous", seed, args, folder, None))
            runs += [train(name, seed, args, folder, name) for name in args.rules.split(",")]
    rows = [
        (
            run.name,
            str(run.seed),
            f"{run.loss:.5f}",
            f"{run.mean_staleness:.2f}",
            str(run.max_staleness),
            f"{run.updates_per_step:.2f}",
            f"{run.behind:.0%}",
            f"{run.seconds:.0f} s",
        )
        for run in runs
    ]
    show_table(("updates", "seed", "validation loss", "mean staleness", "max", "updates/step", "of > 2", "took"), rows)
    bars: list[Bar] = []
    waiting = {run.seed: run.loss for run in runs if run.name == "synchronous"}
    for name in args.rules.split(","):
        mine = [run for run in runs if run.name == name]
        ratio = mean(run.loss / waiting[run.seed] for run in mine)
        staleness = mean(run.mean_staleness for run in mine)
        if staleness < LEAST_STALENESS:
            print(
                f"{name}: mean staleness is {staleness:.2f}; lower --disk-mb-per-s: below {LEAST_STALENESS} says nothing"
            )
            continue
        if args.no_forecast:
            name += ", no forecast"
        if args.staleness_warmup:
            name += f", behind {args.staleness_warmup} synchronous steps"
        job_name = {"gpt": "main job", "t5_moe": "T5 with experts"}[args.job]
        what = (
            f"{job_name}, {len(mine)} seeds, {name}, mean staleness {staleness:.2f}: validation loss over synchronous"
        )
        limit = FAR_LIMIT if staleness >= FAR_STALENESS else LIMIT
        bars.append(
            Bar(what, mean(run.loss for run in mine), mean(waiting.values()), "nats", ratio, limit, at_least=False)
        )
    no_scores: dict[str, Score] = {}
    publish("lock_free_loss.py", args, bars, no_scores)


if __name__ == "__main__":
    main()

"""What does each callback cost a training step of the main job (configs/gpt.yaml)?

A step's wall time spreads by a fifth on a busy machine, so 1 % of it cannot be found by running with and without. Two other
ways, both by CPU time, which other processes do not lengthen:

  hooks   One run with all callbacks. For each: CPU time of the calling thread inside its hooks, and its share, by names
          logged, of what Lightning and TensorBoard's writing thread spend on logged values. Microseconds are seen.
          Not seen: what a callback makes others do elsewhere, such as the events that the engine records for it; what waits
          without computing; caches that it has emptied.
  whole   Short runs of none, of all, and of PerfettoTrace recording each batch, in turns, with batches of one row: CPU
          time of the whole process a step, of which a callback's cost is a larger part there than in the main job, being
          the same. Sees everything that computes; how well is printed, as a standard error.

Demand: each callback's hooks, its events (the difference of `recording`, for the batches that it records) and what it does
once a run, over 300 steps, take at most 1 % of the main job's steps. All is computed by one thread; a step is taken to be
as long as the CPU time of the fastest tenth of them, divided by the cores (--threads), which is stricter than any real one.
GradNormMonitor's cost is the price of the norm: a pass over all gradients, which cores share as they share a step, so its
one thread is compared with a step of one thread.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import Bar, argument_parser, publish, show_table
from lightning.pytorch import Callback, Trainer

import lightning_ptm.callbacks as callbacks
from lightning_ptm.command_line import PTMCommandLine, command_line

LIMIT = 0.01
STEPS_OF_A_RUN = 300
NAMES = (
    "GradNormMonitor",
    "HyperParameters",
    "MemoryTimeline",
    "PageTracer",
    "PerfettoTrace",
    "PlanPrinter",
    "StalenessMonitor",
    "Throughput",
    "TransferMonitor",
)
RECORDED_BATCHES = {"MemoryTimeline": 1, "PerfettoTrace": 3}
SHARED_BY_CORES = ("GradNormMonitor",)
SETTLED = 10
"""Steps of a run in which plans are made and batches recorded; also how often is logged."""


def make(name: str) -> Callback:
    """A callback as it is without arguments, but quiet."""
    made: Callback = getattr(callbacks, name)(**({"show": False} if name == "PlanPrinter" else {}))
    return made


def prepared(
    folder: Path, found: Sequence[Callback], steps: int, batch: int | None, more: Sequence[str]
) -> PTMCommandLine:
    """The main job with these callbacks and no others, its checkpoints and validation left out."""
    sizes = [] if batch is None else [f"--data.init_args.batch_size={batch}"]
    quiet = ["progress_bar", "model_summary", "checkpointing"]
    built = command_line(
        [
            "--config=gpt.yaml",
            "--trainer.callbacks=null",
            f"--trainer.max_steps={steps}",
            "--trainer.limit_val_batches=0",
            f"--trainer.logger.init_args.save_dir={folder}",
            *(f"--trainer.enable_{what}=false" for what in quiet),
            *sizes,
            *more,
        ],
        run=False,
    )
    built.trainer.callbacks.extend(found)
    return built


# --- By hooks -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Cost:
    """CPU seconds of one callback: at each step, before the first one and after the last; and the names that it logs."""

    steps: list[float] = field(default_factory=list)
    outside: float = 0.0
    logged: set[str] = field(default_factory=set)

    @property
    def settled_s(self) -> float:
        return statistics.mean(self.steps[SETTLED:])

    @property
    def once_s(self) -> float:
        """All that is more than a settled step."""
        return self.outside + sum(max(0.0, each - self.settled_s) for each in self.steps[:SETTLED])


class Meter(Callback):
    """Counts what the hooks of others take. Stands last, so that a step ends when all have had their turn."""

    def __init__(self, watched: Mapping[str, Callback]) -> None:
        self.costs = {name: Cost() for name in watched}
        self.step_s: list[float] = []
        self.logging_s = 0.0
        self._inside: str | None = None
        self._now = dict.fromkeys(watched, 0.0)
        self._ended_s: float | None = None
        for name, callback in watched.items():
            for hook in dir(Callback):
                if hook.startswith(("on_", "setup", "teardown")) and getattr(type(callback), hook) is not getattr(
                    Callback, hook
                ):
                    setattr(callback, hook, self._timed(name, getattr(callback, hook)))

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._inside, started_s = name, time.thread_time()
            try:
                return hook(*arguments, **named)
            finally:
                self._now[name] += time.thread_time() - started_s
                self._inside = None

        return timed

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        log, update = module.log, trainer._logger_connector.update_train_step_metrics

        def noted(name: str, *arguments: Any, **named: Any) -> None:
            if self._inside is not None and named.get("logger") is not False:
                self.costs[self._inside].logged.add(name)
            log(name, *arguments, **named)

        def counted() -> None:
            started_s = time.thread_time()
            update()
            self.logging_s += time.thread_time() - started_s

        module.log = noted
        trainer._logger_connector.update_train_step_metrics = counted  # type: ignore[method-assign]

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        for name, cost in self.costs.items():
            if self._ended_s is None:
                cost.outside += self._now[name]
            else:
                cost.steps.append(self._now[name])
            self._now[name] = 0.0
        now_s = time.process_time()
        if self._ended_s is not None:
            self.step_s.append(now_s - self._ended_s)
        self._ended_s = now_s

    def on_train_end(self, trainer: Trainer, *rest: Any) -> None:
        self._writer_s = sum(
            time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            for thread in threading.enumerate()
            if type(thread).__name__ == "_AsyncWriterThread" and thread.ident is not None
        )
        for name, cost in self.costs.items():
            cost.outside += self._now[name]

    @property
    def fast_step_s(self) -> float:
        """CPU seconds of the process: the slowest of the fastest tenth."""
        return sorted(self.step_s[SETTLED:])[len(self.step_s[SETTLED:]) // 10]

    def logging_share_s(self, name: str, baseline: int = 2) -> float:
        """A step's part of logging; `train_loss` and `epoch` are nobody's."""
        names = baseline + sum(len(cost.logged) for cost in self.costs.values())
        return (self.logging_s + self._writer_s) / len(self.step_s) * len(self.costs[name].logged) / names


def by_hooks(folder: Path, steps: int, more: Sequence[str]) -> Meter:
    """One run with all callbacks."""
    watched = {name: make(name) for name in NAMES}
    meter = Meter(watched)
    built = prepared(folder / "hooks", [*watched.values(), meter], steps, None, more)
    built.trainer.fit(built.model, built.datamodule)
    return meter


# --- By the whole process -------------------------------------------------------------------------------------------


class ProcessTime(Callback):
    """CPU seconds of the process for the steps after `SETTLED`."""

    def __init__(self) -> None:
        self.begin_s = self.end_s = 0.0

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == SETTLED:
            self.begin_s = time.process_time()


def sides() -> Iterator[tuple[str, list[Callback]]]:
    """What is compared, built anew."""
    yield "none", []
    yield "all", [make(name) for name in NAMES]
    yield "recording", [callbacks.PerfettoTrace(start=SETTLED, count=1_000_000)]


def whole_process_s(folder: Path, side: list[Callback], steps: int, more: Sequence[str]) -> float:
    """CPU seconds a step."""
    watch = ProcessTime()
    built = prepared(folder, [*side, watch], steps, 1, more)
    gc.collect()

    class End(Callback):
        """Before any callback writes what it has recorded."""

        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == steps - 1:
                watch.end_s = time.process_time()

    built.trainer.callbacks.insert(0, End())
    built.trainer.fit(built.model, built.datamodule)
    return (watch.end_s - watch.begin_s) / (steps - SETTLED)


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one side to none, CPU seconds a step: mean over the repeats, and its standard error."""

    mean_s: float
    error_s: float


def by_whole_process(folder: Path, repeats: int, steps: int, more: Sequence[str]) -> dict[str, Difference]:
    """All sides in turns, the order reversed at every second repeat."""
    found: dict[str, list[float]] = {}
    for repeat in range(-1, repeats):  # the first one warms up
        now = list(sides())
        for name, side in now if repeat % 2 else reversed(now):
            step_s = whole_process_s(folder / f"whole{repeat}_{name}", side, steps, more)
            if repeat >= 0:
                found.setdefault(name, []).append(step_s)
        print(f"  repeat {repeat + 1}", flush=True)
    rows = [(name, f"{1e3 * statistics.median(all_s):.3f}") for name, all_s in found.items()]
    show_table(("side", "CPU ms/step, one row"), rows)
    differences = {}
    for name in set(found) - {"none"}:
        pairs = [mine - none for mine, none in zip(found[name], found["none"], strict=True)]
        error_s = statistics.stdev(pairs) / len(pairs) ** 0.5
        differences[name] = Difference(statistics.mean(pairs), error_s)
    return differences


# --- Both -----------------------------------------------------------------------------------------------------------


def bars(meter: Meter, cores: int, events_s: float) -> list[Bar]:
    """One for each callback, with a table of what its cost is made of."""
    rows, found = [], []
    for name, cost in meter.costs.items():
        logging_s = meter.logging_share_s(name)
        events = events_s * RECORDED_BATCHES.get(name, 0)
        once_s = cost.once_s + events
        a_step_s = cost.settled_s + logging_s + once_s / STEPS_OF_A_RUN
        values = (cost.settled_s, logging_s, cost.once_s, events)
        rows.append((name, *(f"{1e3 * value:.3f}" for value in values), str(len(cost.logged))))
        step_s = meter.fast_step_s / (1 if name in SHARED_BY_CORES else cores)
        share = a_step_s / step_s
        found.append(Bar(name, 1e3 * a_step_s, 1e3 * step_s, "ms a step", share, LIMIT, at_least=False))
    show_table(("CPU ms", "hooks a step", "logging a step", "hooks once", "events once", "names"), rows)
    return found


def main() -> None:
    """Measure, print, and write what the command line asked for."""
    parser = argument_parser(__doc__)
    parser.set_defaults(repeats=8, steps=60)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.steps = 2, 2 * SETTLED
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Two threads would wait for each other by computing, as long as another process has one's core.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # or Lightning's launcher would set them to the number of cores again
    more = [f"--trainer.strategy.init_args.{name}={value}" for name, value in args.set]
    with tempfile.TemporaryDirectory(prefix="lightning_ptm_callbacks_") as folder:
        meter = by_hooks(Path(folder), args.steps + 1, more)
        differences = by_whole_process(Path(folder), args.repeats, args.steps, more)
    found = bars(meter, args.threads, max(0.0, differences["recording"].mean_s))
    hooks_s = sum(cost.settled_s + meter.logging_share_s(name) for name, cost in meter.costs.items())
    for name, what in (
        ("recording", "events of each recorded batch"),
        ("all", f"all; their hooks: {1e3 * hooks_s:.3f}"),
    ):
        difference = differences[name]
        print(f"whole process, {what}: {1e3 * difference.mean_s:.3f} +- {1e3 * difference.error_s:.3f} ms a step")
    publish("callbacks.py", args, found, {})


if __name__ == "__main__":
    main()

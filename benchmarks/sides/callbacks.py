"""One run of the main job (configs/gpt.yaml) with all callbacks of this project: what the hooks of each cost, in CPU time.

A step's wall time spreads by a fifth on a busy machine, so 1 % of it cannot be found by running with and without. CPU time is
not lengthened by other processes. For each callback: the CPU time of the calling thread inside its hooks, and its share, by
names logged, of what Lightning and TensorBoard's writing thread spend on logged values. Not included: what a callback makes
others do elsewhere, such as the events that the engine records for it, and waiting without computing.

Options: `steps`; `threads`, by which the CPU time of a step is divided, except for callbacks that compute on all of
them. A turn is the whole run. Its extra numbers are, by callback, its milliseconds a step and those of a step.
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.race import Baton

STEPS_OF_A_RUN = 300
"""Over which the costs of the start and the end are divided."""
SHARED_BY_CORES = ("GradNormMonitor",)
"""Its cost is a pass over all gradients, which all threads share as they share a step."""
SETTLED = 10
"""Steps of a run in which plans are made and batches recorded."""


@dataclass(slots=True)
class Cost:
    """CPU seconds of one callback at each step, and before the first one and after the last; and the names that it logs."""

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
    """Measures the hooks of other callbacks. It is the last, so that a step ends when all have run."""

    def __init__(self, watched: Mapping[str, Callback]) -> None:
        self.costs = {name: Cost() for name in watched}
        self.step_s: list[float] = []
        self.logging_s = 0.0
        self._writer_s = 0.0
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

    def a_step_s(self, name: str, names_of_others: int = 2) -> float:
        """CPU seconds of one callback in a step, its part of logging included; `train_loss` and `epoch` are Lightning's."""
        cost = self.costs[name]
        names = names_of_others + sum(len(each.logged) for each in self.costs.values())
        logging_s = (self.logging_s + self._writer_s) / len(self.step_s) * len(cost.logged) / names
        return cost.settled_s + logging_s + cost.once_s / STEPS_OF_A_RUN


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    import lightning_ptm.callbacks as callbacks
    from lightning_ptm.command_line import command_line

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Two threads would wait for each other by computing while another process has a core.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # or Lightning's launcher would set it to the number of cores
    baton.ready()
    while baton.wait():
        with tempfile.TemporaryDirectory(prefix="lightning_ptm_callbacks_") as folder:
            watched: dict[str, Callback] = {}
            for name in callbacks.__all__:
                watched[name] = getattr(callbacks, name)(**({"show": False} if name == "PlanPrinter" else {}))
            meter = Meter(watched)
            built = command_line(
                [
                    "--config=gpt.yaml",
                    "--trainer.callbacks=null",
                    f"--trainer.max_steps={options['steps']}",
                    "--trainer.limit_val_batches=0",
                    f"--trainer.logger.init_args.save_dir={Path(folder)}",
                    *(f"--trainer.enable_{what}=false" for what in ("progress_bar", "model_summary", "checkpointing")),
                ],
                run=False,
            )
            built.trainer.callbacks.extend([*watched.values(), meter])
            built.trainer.fit(built.model, built.datamodule)
        found = {}
        for name in watched:
            step_s = meter.fast_step_s / (1 if name in SHARED_BY_CORES else options["threads"])
            found[name] = {"ms": 1e3 * meter.a_step_s(name), "step_ms": 1e3 * step_s}
        baton.report(0.0, found)

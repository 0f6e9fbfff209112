"""Callback that writes the paper's Tracer table, as a file and to TensorBoard (Angel-PTM, section 5).

Owns which trace was written last. I1: nothing here is collective; only rank 0 writes.
"""

from __future__ import annotations

import csv
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ptm import Trace

from .where import file_of, loop_tag, own_name, pages_of, show_text

COLUMNS = ("tensor_id", "first_id", "end_id", "cpu_time", "gpu_time", "name")


class PageTracer(Callback):
    """Writes the table of the last traced iteration to `page_trace.csv` in the logger's folder (without a logger, in
    `lightning_ptm_logs` in the Trainer's root folder), and to TensorBoard as the text `pages/trace`: for each tensor
    `tensor_id`, the first and the last tick of its use (`first_id`, `end_id`), the seconds that the ticks of its unit took
    (`cpu_time`, `gpu_time`), and its name.

    The runtime traces an iteration if it has no confirmed plan, so this costs nothing but the writing, once or twice per
    run. The trace of a training iteration is complete when the next one begins, so a run of one step has none. In validate,
    test and predict the file is `page_trace_<loop>.csv` and the text `pages/trace/<loop>`. `fast_dev_run` writes nothing.
    Numbers are of rank 0. Does nothing with other strategies.
    """

    def __init__(self) -> None:
        self._written: Trace | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._written = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._look(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        """Writes a new trace, as in training; in a validation inside fit it is that of training."""
        self._look(trainer)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def _look(self, trainer: Trainer) -> None:
        strategy = pages_of(trainer)
        if strategy is None or not trainer.is_global_zero:
            return
        trace = strategy.last_trace()
        if trace is None or trace is self._written:
            return
        self._written = trace
        rows = [[getattr(use, column) for column in COLUMNS] for use in trace.tensors]
        path = file_of(trainer, self, "page_trace.csv")
        if path is not None:
            with path.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(COLUMNS)
                writer.writerows(rows)
        titles = [f"{column}, s" if column.endswith("_time") else column for column in COLUMNS]
        lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(COLUMNS)]
        for number, first, end, cpu_s, gpu_s, name in rows:
            lines.append(f"| {number} | {first} | {end} | {cpu_s:.6f} | {gpu_s:.6f} | `{name}` |")
        show_text(trainer, loop_tag(trainer, own_name(trainer, self, "pages/trace")), "\n".join(lines))

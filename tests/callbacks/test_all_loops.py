"""The callbacks together, as users put them together: outside fit, without TensorBoard, without a logger, several of a
kind, several batches a step, through a failure."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_ptm.callbacks import (
    GradNormMonitor,
    HyperParameters,
    MemoryTimeline,
    PageMonitor,
    PageTracer,
    PerfettoTrace,
    PlanPrinter,
    StalenessMonitor,
    Throughput,
    ThroughputMonitor,
    TransferMonitor,
    where,
)

FILES = {"page_trace.csv", "memory_inventory.csv", "memory_timeline.csv", "memory_timeline.png", "perfetto_trace.json"}


def everything() -> list[Any]:
    return [
        PlanPrinter(show=False),
        PageTracer(),
        MemoryTimeline(batch=1),
        PageMonitor(),
        PerfettoTrace(start=1, count=1),
        ThroughputMonitor(matrix_flops_per_s=1e9),
        GradNormMonitor(),
        HyperParameters(),
    ]


def of_loop(loop: str) -> set[str]:
    return {f"{Path(name).stem}_{loop}{Path(name).suffix}" for name in FILES}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_other_loops_log_under_their_own_names(strategy_at, board_trainer, model, data, board, tmp_path, loop) -> None:
    """A run without fit, which has no optimizer: each number is logged at the batch that it belongs to."""
    trainer = board_trainer(strategy_at("all_on_disk"), everything(), log_every_n_steps=2)
    getattr(trainer, loop)(model, data)
    shown = board()
    scalars = {tag for tag in shown.Tags()["scalars"] if tag.endswith(f"/{loop}")}
    assert {tag.split("/")[0] for tag in scalars} == {"memory", "links", "stall", "speed"}
    assert [event.step for event in shown.Scalars(f"links/cache_hits/{loop}")] == [2, 4]
    assert [event.step for event in shown.Scalars(f"memory/disk_MB/{loop}")] == [2, 4]
    *_, speed = shown.Scalars(f"speed/model_TFLOP_per_s/{loop}")
    *_, tokens = shown.Scalars(f"speed/tokens_per_s/{loop}")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (speed.step, tokens.step) == (4, 4)
    assert speed.value == pytest.approx(2 * parameters * tokens.value / 1e12, rel=1e-5)  # forward alone
    # Two batches a log; each reads the three blocks' 16-bit parameters.
    read = [event.value for event in shown.Scalars(f"links/disk_to_host_MB_per_step/{loop}")]
    assert read[1] == pytest.approx(2 * parameters / 1e6, rel=0.05)
    assert names(tmp_path / "logs") >= of_loop(loop)


def test_a_loop_after_fit_does_not_mix_with_it(strategy_at, board_trainer, model, data, board, tmp_path) -> None:
    callbacks = [PageMonitor(), MemoryTimeline(), PerfettoTrace(start=1, count=1), PageTracer()]
    trainer = board_trainer(strategy_at("three_tiers"), callbacks)
    trainer.fit(model, data)
    of_fit = {name: (tmp_path / "logs" / name).read_bytes() for name in FILES}
    trainer.test(model, data, verbose=False)
    assert {name: (tmp_path / "logs" / name).read_bytes() for name in FILES} == of_fit
    assert names(tmp_path / "logs") >= of_loop("test")
    shown = board()
    assert len(shown.Images("memory/timeline")) == len(shown.Images("memory/timeline/test")) == 1
    for tag in ("links/overlap", "memory/host_MB", "stall/fetch_s_per_step"):
        assert [event.step for event in shown.Scalars(tag)] == [0, 1, 2, 3], tag
        assert [event.step for event in shown.Scalars(f"{tag}/test")] == [1, 2, 3, 4], tag
    assert not any(tag.startswith("update/") and tag.endswith("/test") for tag in shown.Tags()["scalars"])


def test_overlap_and_cache_hits_are_shares(strategy_at, board_trainer, model, data, board) -> None:
    board_trainer(strategy_at("ram"), [TransferMonitor()]).fit(model, data)
    assert {event.value for event in board().Scalars("links/cache_hits")} == {1.0}  # everything lives there
    assert "links/overlap" not in board().Tags()["scalars"]  # nothing moves


def test_of_what_does_not_fit_some_is_kept_and_the_rest_is_fetched_ahead(
    strategy_at, board_trainer, model, data, board
) -> None:
    seen: list[Any] = []

    class Look(TransferMonitor):
        def numbers(self, now, before, steps):  # type: ignore[no-untyped-def]
            seen.append((before.uses, now.uses))
            return super().numbers(now, before, steps)

    board_trainer(strategy_at("three_tiers"), [Look()], max_epochs=2).fit(model, data)
    shown = board()
    hits, ahead, overlap = (
        [event.value for event in shown.Scalars(f"links/{name}")] for name in ("cache_hits", "fetched_ahead", "overlap")
    )
    assert all(0 <= value <= 1 for value in overlap)
    # Three blocks' forward and backward a step; the last one stays between the two.
    before, now = seen[-1]
    assert now.kept - before.kept == round(hits[-1] * 6) >= 1
    assert now.ahead - before.ahead == round(ahead[-1] * 6) >= 3
    assert hits[-1] + ahead[-1] == pytest.approx(1.0)


def test_a_validation_inside_fit_is_not_counted(strategy_at, board_trainer, model, data, board, tmp_path) -> None:
    """A step's bytes are those of a run without any validation, although twenty validations of four batches run between
    two steps."""
    read: list[float] = []
    for batches in (0, 4):
        options: dict[str, Any] = {"limit_val_batches": batches, "val_check_interval": 1}
        trainer = board_trainer(
            strategy_at("all_on_disk"), [TransferMonitor()], **options, logger=CSVLogger(tmp_path, version=str(batches))
        )
        trainer.fit(model, data, data)
        read.append(float(trainer.callback_metrics["links/disk_to_host_MB_per_step"]))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # The first batch of a validation counts: it waits for the step's updates.
    assert read[1] - read[0] < 1.3 * 2 * parameters / 1e6


def test_without_tensorboard_there_are_the_files_and_the_numbers(
    strategy_at, board_trainer, model, data, tmp_path
) -> None:
    trainer = board_trainer(
        strategy_at("three_tiers"), everything(), logger=CSVLogger(tmp_path, name="", version="csv")
    )
    trainer.fit(model, data, data)
    trainer.predict(model, data)
    assert names(tmp_path / "csv") == FILES | of_loop("predict") | {"metrics.csv"}
    with (tmp_path / "csv" / "metrics.csv").open(newline="") as file:
        logged = {column for row in csv.DictReader(file) for column, value in row.items() if value}
    groups = {column.split("/")[0] for column in logged}
    assert groups >= {"memory", "links", "stall", "update", "speed", "gradients"}
    assert "links/overlap/predict" in logged


def test_without_a_logger_files_go_to_a_folder_of_their_own_and_say_so(
    strategy_at, board_trainer, model, data, tmp_path, monkeypatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        where, "rank_zero_info", said.append
    )  # whose logger may or may not be pytest's, by order of imports
    trainer = board_trainer(
        strategy_at("three_tiers"), everything(), logger=False, default_root_dir=tmp_path / "root", max_epochs=2
    )
    trainer.fit(model, data, data)
    for loop in (trainer.validate, trainer.test, trainer.predict):
        loop(model, data)
    folder = tmp_path / "root" / "lightning_ptm_logs"
    assert names(tmp_path / "root") == set()
    assert names(folder) == FILES | of_loop("validate") | of_loop("test") | of_loop("predict")
    for path in folder.iterdir():
        assert sum(text.endswith(f" writes {path}") for text in said) == 1


class Service(Logger):
    """A logger that has a folder for runs but no log_dir, as those of services have."""

    name, version = "project", "run7"

    def __init__(self, save_dir: Path | None) -> None:
        super().__init__()
        self.folder = save_dir

    @property
    def save_dir(self) -> str | None:
        return None if self.folder is None else str(self.folder)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any, *rest: Any, **more: Any) -> None: ...


@pytest.mark.parametrize("saves", [True, False])
def test_a_loggers_folder_for_runs_is_where_files_go(
    strategy_at, board_trainer, model, data, tmp_path, monkeypatch, saves
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    logger = Service(tmp_path / "runs" if saves else None)
    board_trainer(strategy_at("ram"), [PerfettoTrace(0, 1)], logger=logger).fit(model, data)
    folder = tmp_path / "runs" / "project" / "run7" if saves else tmp_path / "here" / "lightning_ptm_logs"
    assert list(tmp_path.rglob("perfetto*")) == [folder / "perfetto_trace.json"]


def test_a_run_that_only_tries_writes_nothing(strategy_at, board_trainer, model, data, tmp_path, monkeypatch) -> None:
    """fast_dev_run has a logger that answers to everything and logs nothing."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    trainer = board_trainer(
        strategy_at("three_tiers"), everything(), default_root_dir=tmp_path / "root", fast_dev_run=3
    )
    trainer.fit(model, data, data)
    trainer.predict(model, data)
    trainer = board_trainer(strategy_at("three_tiers"), everything(), logger=False, fast_dev_run=3)
    trainer.fit(model, data)
    written = {path.name for path in tmp_path.rglob("*")}
    assert not written & FILES and not list((tmp_path / "here").iterdir())


def test_two_of_a_kind_keep_out_of_each_others_way(strategy_at, board_trainer, model, data, board, tmp_path) -> None:
    callbacks = [
        MemoryTimeline(batch=1),
        MemoryTimeline(batch=2),
        PerfettoTrace(start=1, count=1),
        PerfettoTrace(start=2, count=1),
        PageTracer(),
        PageTracer(),
        PageMonitor(),
        PageMonitor(),
        TransferMonitor(),
        StalenessMonitor(),
        Throughput(),
        ThroughputMonitor(matrix_flops_per_s=1e9),
        GradNormMonitor(),
        GradNormMonitor(norm_type=float("inf")),
    ]
    board_trainer(strategy_at("three_tiers"), callbacks).fit(model, data)
    folder = tmp_path / "logs"
    doubles = {f"{Path(name).stem}_2{Path(name).suffix}" for name in FILES}
    assert FILES | doubles <= names(folder)
    for name, batch in (("perfetto_trace.json", 1), ("perfetto_trace_2.json", 2)):
        rows = json.loads((folder / name).read_text())["traceEvents"]
        assert [row["name"] for row in rows if row["name"].startswith("batch ")] == [f"batch {batch}"]
    tags = board().Tags()
    assert set(tags["images"]) == {"memory/timeline", "memory/timeline_2"}
    assert all(
        one.value > other.value > 0
        for one, other in zip(board().Scalars("gradients/norm"), board().Scalars("gradients_2/norm"), strict=True)
    )


@pytest.mark.parametrize("tier", ["lock_free", "three_tiers_lock_free"])
def test_several_batches_a_step_and_late_updates(strategy_at, board_trainer, model, board, tmp_path, tier) -> None:
    settings = {"lock_free": {"max_staleness": 1}} if tier == "three_tiers_lock_free" else {}
    strategy = strategy_at(tier.removesuffix("_lock_free") if settings else tier, **settings)
    rows = torch.utils.data.DataLoader(torch.randn(32, 64), batch_size=4)  # type: ignore[arg-type, var-annotated]
    board_trainer(strategy, everything(), accumulate_grad_batches=2, max_epochs=1).fit(model, rows)
    shown = board()
    assert [event.step for event in shown.Scalars("update/staleness_max")] == [0, 1, 2, 3]
    assert len(shown.Scalars("gradients/norm")) == 4
    assert names(tmp_path / "logs") >= FILES


def test_a_failed_run_and_one_after_it(strategy_at, board_trainer, model, data, tmp_path) -> None:
    """The records up to the error are kept, and the same callbacks serve the next run."""
    callbacks = everything()
    fails = dict.fromkeys([2], True)
    step = model.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if fails.pop(batch_idx, False):
            raise RuntimeError("no more")
        return step(batch, batch_idx)

    model.training_step = training_step
    with pytest.raises(RuntimeError, match="no more"):
        board_trainer(strategy_at("three_tiers"), callbacks).fit(model, data)
    assert names(tmp_path / "logs") >= FILES
    for path in (tmp_path / "logs").iterdir():
        path.unlink()
    board_trainer(strategy_at("three_tiers"), callbacks).fit(model, data)
    assert names(tmp_path / "logs") >= FILES


def test_a_batch_that_goes_through_the_plan_twice_shows_the_most_of_each_tick(
    strategy_at, board_trainer, model, data
) -> None:
    def predict_step(batch: Any, batch_idx: int) -> Any:
        return model(model(batch))

    model.predict_step = predict_step
    watch = MemoryTimeline()
    board_trainer(strategy_at("three_tiers"), [watch], logger=False).predict(model, data)
    assert {len(curve.measured) for curve in watch.curves} == {5}

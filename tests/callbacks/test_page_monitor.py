"""The monitors of links, stalls and updates: their groups of numbers, and that these are the counters'."""

from __future__ import annotations

import jsonargparse
import pytest
from lightning.pytorch import Callback

import lightning_ptm.callbacks
from lightning_ptm.callbacks import PageMonitor, StalenessMonitor, TransferMonitor


def test_each_monitor_logs_its_groups(strategy_at, board_trainer, model, data, board) -> None:
    groups = {}
    for monitor in (TransferMonitor, StalenessMonitor, PageMonitor):
        trainer = board_trainer(strategy_at("three_tiers"), [monitor()], logger=False)
        trainer.fit(model, data)
        groups[monitor] = {name for name in trainer.callback_metrics if "/" in name}
    assert {name.split("/")[0] for name in groups[TransferMonitor]} == {"links", "stall"}
    assert {name.split("/")[0] for name in groups[StalenessMonitor]} == {"update"}
    assert groups[PageMonitor] == groups[TransferMonitor] | groups[StalenessMonitor]


def test_bytes_of_links_are_those_of_the_counters(strategy_at, board_trainer, model, data, board) -> None:
    seen = []

    class Look(TransferMonitor):
        def on_train_start(self, trainer, module) -> None:
            super().on_train_start(trainer, module)
            seen.append(self._last)

        def on_train_batch_end(self, trainer, module, *rest) -> None:
            super().on_train_batch_end(trainer, module, *rest)
            seen.append(self._last)

    board_trainer(strategy_at("three_tiers"), [Look()]).fit(model, data)
    logged = [event.value for event in board().Scalars("links/disk_to_host_MB_per_step")]
    assert sum(logged) > 0
    first = seen[0].links.get("disk_to_host")
    moved = seen[-1].links["disk_to_host"].bytes - (first.bytes if first else 0)
    assert sum(logged) == pytest.approx(moved / 1e6, rel=1e-4)


def test_activations_that_leave_are_links_of_their_own(
    activations_leave, strategy_at, board_trainer, model, data, board
) -> None:
    board_trainer(strategy_at("ram", offload_activations="host"), [TransferMonitor()]).fit(model, data)
    # Of each block and row: its input and what its GELU takes and gives, in bf16; the last block stays until the backward.
    sent, back = (
        [event.value * 1e6 for event in board().Scalars(f"links/activations_to_{tier}_MB_per_step")]
        for tier in ("host", "device")
    )
    assert sent == pytest.approx([3 * 4 * 2 * (64 + 256 + 256)] * 4)
    assert back == pytest.approx([2 * 4 * 2 * (64 + 256 + 256)] * 4)
    assert all(event.value > 0 for event in board().Scalars("links/activations_to_host_GB_per_s"))


def test_lock_free_updates_say_how_stale_they_are(strategy_at, board_trainer, model, data) -> None:
    trainer = board_trainer(
        strategy_at("lock_free", lock_free={"max_staleness": 1}), [StalenessMonitor()], logger=False
    )
    trainer.fit(model, data)
    metrics = trainer.callback_metrics
    assert 0 <= metrics["update/staleness_mean"] <= metrics["update/staleness_max"] <= 1
    assert "update/updates_per_step" in metrics


LOCK_FREE_TAGS = {
    *(f"update/{name}" for name in ("staleness_mean", "staleness_max", "updates_per_step", "arithmetic_s_per_step")),
    *(f"links/disk_to_host_{name}" for name in ("MB_per_step", "GB_per_s")),
    *(f"links/host_to_disk_{name}" for name in ("MB_per_step", "GB_per_s")),
    *(f"links/{way}_{name}" for way in ("host_to_device", "device_to_host") for name in ("MB_per_step", "GB_per_s")),
    *(f"stall/{cause}_s_per_step" for cause in ("fetch", "update", "save")),
    *(f"update/gradients_{name}" for name in ("produced", "applied", "pending", "skipped")),
}


@pytest.mark.parametrize("bound", [1, 16])
def test_what_tensorboard_shows_of_lock_free_updates(strategy_at, board_trainer, model, data, board, bound) -> None:
    seen = []

    class Look(PageMonitor):
        def on_train_batch_end(self, trainer, module, *rest) -> None:
            super().on_train_batch_end(trainer, module, *rest)
            seen.append(self._last)

    strategy = strategy_at("lock_free_three_tiers", lock_free={"max_staleness": bound})
    board_trainer(strategy, [Look()], val_check_interval=2, limit_val_batches=1).fit(model, data, data)
    shown = board()
    tags = set(shown.Tags()["scalars"])
    assert tags >= LOCK_FREE_TAGS
    values = {tag: [event.value for event in shown.Scalars(tag)] for tag in tags}
    assert all(0 <= mean <= most <= bound for mean, most in zip(*staleness(values), strict=True))
    assert values["update/staleness_max"] == [each.staleness.maximum for each in seen]
    assert values["update/updates_per_step"] == pytest.approx([each.updates_per_step for each in seen])
    # Three blocks, after two steps, after four, and at the end; a drain has applied all of them.
    assert values["update/gradients_produced"] == [6, 12, 12]
    assert values["update/gradients_applied"] == values["update/gradients_produced"]
    assert values["update/gradients_pending"] == values["update/gradients_skipped"] == [0, 0, 0]


def staleness(values: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    return values["update/staleness_mean"], values["update/staleness_max"]


@pytest.mark.slow_unless(
    "GradNormMonitor", "HyperParameters", "PageMonitor", "StalenessMonitor", "Throughput", "ThroughputMonitor"
)
@pytest.mark.parametrize("name", lightning_ptm.callbacks.__all__)
def test_every_callback_works_from_yaml_without_arguments_in_all_loops(
    strategy_at, board_trainer, model, data, name
) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(Callback, "callback")
    config = parser.parse_object({"callback": {"class_path": f"lightning_ptm.callbacks.{name}"}})
    callback = parser.instantiate_classes(config).callback
    trainer = board_trainer(strategy_at("ram"), [callback])
    trainer.fit(model, data, data)
    trainer.validate(model, data, verbose=False)
    trainer.test(model, data, verbose=False)
    trainer.predict(model, data)
    board_trainer("auto", [callback]).fit(model, data)

"""The run's row in TensorBoard's table: hyper-parameters, the names of its metrics, and whether it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lightning_ptm.callbacks import HyperParameters, Throughput
from lightning_ptm.callbacks.where import settings_of


class Data(LightningDataModule):
    """Data module with settings of its own, one with the same name as one of the model's."""

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows
        self.save_hyperparameters({"depth": 5, "batch": 4, "_instantiator": "x"}, logger=False)

    def train_dataloader(self) -> Any:
        return self.rows

    val_dataloader = train_dataloader


def test_the_row_of_a_run(strategy_at, board_trainer, model, data, board, tmp_path: Path) -> None:
    model.save_hyperparameters({"depth": 3, "sizes": {"width": 64}, "names": ["a"], "_instantiator": "x"})
    logger = TensorBoardLogger(tmp_path / "logs", name="", version="", default_hp_metric=False)
    board_trainer(strategy_at("ram"), [HyperParameters(), Throughput()], logger=logger).fit(
        model, datamodule=Data(data)
    )
    rows = {}
    for tag in ("experiment", "session_start_info", "session_end_info"):
        content = board().SummaryMetadata(f"_hparams_/{tag}").plugin_data.content
        rows[tag] = HParamsPluginData.FromString(content)
    values = rows["session_start_info"].session_start_info.hparams
    assert (values["depth"].number_value, values["sizes/width"].number_value) == (3, 64)
    assert (values["data/depth"].number_value, values["batch"].number_value) == (5, 4)
    assert (values["names"].string_value, values["strategy/page_size"].string_value) == ("['a']", "64KiB")
    assert values["ranks"].number_value == 1 and values["strategy/lock_free"].string_value == "False"
    assert values["strategy/checkpoints.state_dict_type"].string_value == "full"
    assert not any("_instantiator" in name or "(" in value.string_value for name, value in values.items())
    metrics = {info.name.tag for info in rows["experiment"].experiment.metric_infos}
    assert metrics == {"loss", "speed/tokens_per_s"} <= set(board().Tags()["scalars"])
    assert rows["session_end_info"].session_end_info.status == 1  # success


def test_nested_settings_are_hyper_parameters_by_field(strategy_at) -> None:
    values = settings_of(strategy_at("ram", lock_free={"max_staleness": 3}))
    assert values["lock_free.max_staleness"] == 3 and "lock_free" not in values
    assert settings_of(strategy_at("ram"))["lock_free"] is False


def test_a_logger_that_has_its_own_row_is_told_of(strategy_at, board_trainer, model, data) -> None:
    with pytest.warns(UserWarning, match="default_hp_metric=False"):
        board_trainer(strategy_at("ram"), [HyperParameters()]).fit(model, data)

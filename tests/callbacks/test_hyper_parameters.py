"""The run's row in TensorBoard's table: hyper-parameters, the names of its metrics, and whether it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lightning_ptm.callbacks import HyperParameters, Throughput


class Data(LightningDataModule):
    """With settings of its own, one of them of the same name as one of the model's."""

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
    assert not any("_instantiator" in name for name in values)
    metrics = {info.name.tag for info in rows["experiment"].experiment.metric_infos}
    assert metrics == {"loss", "speed/tokens_per_s"} <= set(board().Tags()["scalars"])
    assert rows["session_end_info"].session_end_info.status == 1  # success


def test_a_logger_that_has_its_own_row_is_told_of(strategy_at, board_trainer, model, data) -> None:
    with pytest.warns(UserWarning, match="default_hp_metric=False"):
        board_trainer(strategy_at("ram"), [HyperParameters()]).fit(model, data)

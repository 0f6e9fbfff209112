"""The configs: each is complete and understood by the command line, and the small ones train to a useful loss."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_ptm.cli import PTMCommandLine, command_line

CONFIGS = Path(__file__).parents[1] / "configs"
NAMES = sorted(path.name for path in CONFIGS.glob("*.yaml"))


class ParsedOnly(PTMCommandLine):
    """The command line without what it would build."""

    def instantiate_classes(self) -> None:
        pass


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_of_a_config_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    path = CONFIGS / name
    parsed = ParsedOnly(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        args=["--config", str(path)],
        run=False,
    )
    model, data = parsed.config["model"]["init_args"], parsed.config["data"]["init_args"]
    assert data["sequence_length"] <= model.get("sequence_length", math.inf)
    assert model["meta"]
    title = path.read_text().split("seed_everything")[0]
    assert f"--config {name}" in title
    assert parsed.config["trainer"]["logger"]["init_args"]["name"] == path.stem


def fit(name: str, root: Path, *options: str) -> object:
    """Runs a config on one thread."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
        logs = f"--trainer.logger.init_args.save_dir={root}"
        return command_line(["fit", "--config", str(CONFIGS / name), logs, *quiet, *options])

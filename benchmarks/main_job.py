"""The main job (configs/gpt.yaml), or another small one of the configs, with other settings of the strategy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from common import ROOT

sys.path.insert(0, str(ROOT))

from lightning_ptm.command_line import PTMCommandLine, command_line


def main_job(seed: int, steps: int, runs: Path, settings: Mapping[str, object], config: str = "gpt") -> PTMCommandLine:
    """The main job, not yet begun: `steps` of it, and validation behind the last, without files but those in `runs`.

    Args:
        settings: of the strategy.
        config: another job's name in `configs`.
    """
    args = [f"--config={ROOT / 'configs' / f'{config}.yaml'}", f"--seed_everything={seed}"]
    args += [f"--trainer.{name}=false" for name in ("logger", "enable_progress_bar", "enable_model_summary")]
    args += ["--trainer.callbacks=null", "--trainer.enable_checkpointing=false", f"--trainer.default_root_dir={runs}"]
    args += [f"--trainer.max_steps={steps}", f"--trainer.val_check_interval={steps}"]
    words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()}
    return command_line(
        args=[*args, *(f"--trainer.strategy.init_args.{name}={word}" for name, word in words.items())], run=False
    )

"""Runs of `pytorch_lightning.Trainer`: they are compared with plain ones, exchange checkpoints with lightning.pytorch, and
pass the tests of other files, in a copy whose imports are renamed."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import pytorch_lightning.cli
import torch
from kit.models import Block
from kit.other_namespace import copy_renamed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ptm
import lightning_ptm.pytorch_lightning as theirs
from lightning_ptm import ConfigError, UsageError
from lightning_ptm.pytorch_lightning import callbacks, renamed
from lightning_ptm.trainer import device_mesh, strategy

PACKAGES: dict[str, ModuleType] = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}
STRATEGIES: dict[str, Any] = {"lightning": lightning_ptm.AngelPTMStrategy, "pytorch_lightning": theirs.AngelPTMStrategy}


def module_of(package: str) -> Any:
    """A module of this package, with the same first weights for both."""

    class Module(PACKAGES[package].LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 64) -> None:
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(0)
            self.blocks = nn.Sequential(Block(width), Block(width))

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self.blocks(batch[0]).square().mean()
            self.log("loss", loss)
            return loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    return Module()


def trainer(package: str, strategy: Any, **options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return PACKAGES[package].Trainer(strategy=strategy, accelerator="cpu", devices=1, **{**quiet, **options})


def data() -> DataLoader[Any]:
    vectors = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(vectors), batch_size=2)


def trained(package: str, strategy: Any = "auto", resume: Path | None = None, **options: Any) -> Any:
    """The Trainer, after a fit of a module of its own."""
    made = trainer(package, strategy, **options)
    made.fit(module_of(package), data(), ckpt_path=resume)
    return made


def assert_equal(first: Any, second: Any) -> None:
    ours, plain = first.lightning_module.state_dict(), second.lightning_module.state_dict()
    assert ours.keys() == plain.keys()
    assert [name for name in ours if not torch.equal(ours[name], plain[name])] == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"offload_optimizer": "disk", "offload_parameters": "disk", "recompute": "all"},
        {"lock_free": {"max_staleness": 0}},
    ],
    ids=["ram", "disk", "lock_free"],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_numbers_are_those_of_a_plain_trainer(settings: dict[str, Any], precision: str, disk: Path) -> None:
    options = {"precision": precision, "accumulate_grad_batches": 2, "max_epochs": 2}
    made = theirs.AngelPTMStrategy(page_size="64KiB", disk_path=disk, **settings)
    ours = trained("pytorch_lightning", made, callbacks=[callbacks.GradNormMonitor()], **options)
    assert_equal(ours, trained("pytorch_lightning", **options))
    assert "gradients/norm" in ours.callback_metrics


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize(("writer", "reader"), [("pytorch_lightning", "lightning"), ("lightning", "pytorch_lightning")])
def test_checkpoints_of_either_package_are_resumed_from_by_the_other(
    writer: str, reader: str, kind: Any, tmp_path: Path
) -> None:
    def saves(package: str) -> Any:
        return STRATEGIES[package](checkpoints=theirs.Checkpoints(state_dict_type=kind))

    path = tmp_path / "three.ckpt"
    trained(writer, saves(writer), max_epochs=1).save_checkpoint(path)
    resumed = trained(reader, saves(reader), path, max_epochs=2)
    assert resumed.global_step == 6
    assert_equal(resumed, trained(writer, max_epochs=2))
    if kind == "full":
        assert_equal(resumed, trained(reader, resume=path, max_epochs=2))
        assert torch.load(path, weights_only=True)["hyper_parameters"] == {"width": 64}


def test_a_run_within_a_run_of_the_other_package_finds_its_weights_taken(disk: Path) -> None:
    outer, on_disk = module_of("lightning"), {"offload_optimizer": "disk", "disk_path": disk}

    def begin(*ignored: Any) -> None:
        inner = module_of("pytorch_lightning")
        inner.blocks = outer.blocks
        trainer("pytorch_lightning", "angel_ptm", max_steps=1).fit(inner, data())

    outer.on_train_batch_end = begin
    with pytest.raises(UsageError, match="used by a run that is in progress"):
        trainer("lightning", STRATEGIES["lightning"](**on_disk), max_steps=2).fit(outer, data())


def test_the_command_line_of_pytorch_lightning_knows_the_class_by_its_short_name() -> None:
    given = ["--trainer.strategy=AngelPTMStrategy", "--trainer.strategy.init_args.offload_optimizer=host"]
    given += ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.callbacks=PageMonitor"]
    made = pytorch_lightning.cli.LightningCLI(type(module_of("pytorch_lightning")), run=False, args=given).trainer
    assert type(made.strategy) is theirs.AngelPTMStrategy and made.strategy.settings.offload_optimizer == "host"
    assert callbacks.PageMonitor in map(type, made.callbacks)


def test_modules_of_pytorch_lightning_are_planned_for_by_its_plan() -> None:
    class Module(type(module_of("pytorch_lightning"))):  # type: ignore[misc]
        def forward(self, vectors: Tensor) -> Any:
            return self.blocks(vectors)

    found = theirs.plan(Module(), torch.ones(2, 64), hardware="rtx4090")
    assert "torch.optim.adamw.AdamW" in str(found) and "assumed" not in str(found)
    with pytest.raises(
        ConfigError, match=r"of pytorch_lightning, .*`from lightning_ptm\.pytorch_lightning import plan`"
    ):
        lightning_ptm.plan(Module(), torch.ones(2, 64), hardware="rtx4090")


def test_classes_are_copies_and_what_knows_no_lightning_is_the_same() -> None:
    assert theirs.AngelPTMStrategy is not lightning_ptm.AngelPTMStrategy
    assert issubclass(callbacks.PageMonitor, pytorch_lightning.Callback)
    for name in ("AngelPTMStrategy", "AngelPTMPrecision", "Checkpoints"):
        assert pickle.loads(pickle.dumps(getattr(theirs, name))) is getattr(theirs, name)
    assert theirs.Checkpoints is lightning_ptm.Checkpoints
    assert theirs.trainer.ranks.last_groups is device_mesh.last_groups
    assert theirs.trainer.strategy.__file__ == strategy.__file__
    assert set(lightning_ptm.__all__) <= set(dir(theirs))
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
        theirs.nosuch  # noqa: B018
    with pytest.raises(
        ModuleNotFoundError, match=r"No module named 'lightning_ptm\.pytorch_lightning\.trainer\.nosuch'"
    ):
        pytest.importorskip("lightning_ptm.pytorch_lightning.trainer.nosuch", exc_type=KeyboardInterrupt)


def test_names_are_replaced_where_they_are_whole() -> None:
    text = """
        from lightning.pytorch.callbacks import Callback
        from lightning_ptm import AngelPTMStrategy
        from lightning_ptm.trainer.run import Run
        from lightning_ptm.trainer.registered import NAMES
        from lightning_ptm.runtime.engine.engine import Engine
        "lightning_ptm.callbacks", "lightning.pt", "lightning_ptm.trainers"
    """
    assert (
        renamed(text)
        == """
        from pytorch_lightning.callbacks import Callback
        from lightning_ptm.pytorch_lightning import AngelPTMStrategy
        from lightning_ptm.pytorch_lightning.trainer.run import Run
        from lightning_ptm.trainer.registered import NAMES
        from lightning_ptm.runtime.engine.engine import Engine
        "lightning_ptm.pytorch_lightning.callbacks", "lightning.pt", "lightning_ptm.trainers"
    """
    )


QUICK = [
    "tests/adversarial/test_checkpoint_integrity.py",
    "tests/adversarial/test_evaluation_after_fit.py",
    "tests/adversarial/test_lightnings_own_callbacks.py",
    "tests/adversarial/test_lightnings_own_promises.py",
    "tests/callbacks/test_page_monitor.py",
    "tests/callbacks/test_throughput.py",
    "tests/checkpoints/test_auto_resume.py",
    "tests/ranks/test_rank_resume.py",
    "tests/trainer/test_lightning_features.py",
    "tests/trainer/test_lightning_hooks.py",
    "tests/trainer/test_loggers.py",
    "tests/trainer/test_run_lifetime.py",
    "tests/trainer/test_step_hooks.py",
    "tests/trainer/test_strategy.py",
    "tests/trainer/test_zero_grad.py",
    "tests/test_imports.py",
]
"""Tests that see much of Lightning, and take little time each. Others see the same classes at work on other models."""
SLOW = [
    "tests/adversarial",
    "tests/callbacks",
    "tests/checkpoints",
    "tests/ranks/test_rank_callbacks.py",
    "tests/ranks/test_rank_lifecycle.py",
    "tests/ranks/test_rank_parity.py",
    "tests/runtime/test_checkpoint_files.py",
    "tests/runtime/test_manual_optimization.py",
    "tests/runtime/test_parity.py",
    "tests/runtime/test_runs.py",
    "tests/runtime/test_sharded.py",
    "tests/runtime/test_units_and_autograd.py",
    "tests/test_bad_input.py",
    "tests/test_bad_runs.py",
    "tests/trainer",
]


@pytest.mark.parametrize(
    "chosen", [QUICK, pytest.param(SLOW, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])], ids=["quick", "slow"]
)
@pytest.mark.timeout(1200)
def test_other_tests_pass_with_their_imports_renamed(chosen: list[str], tmp_path: Path) -> None:
    """Their quick cases. The first of these processes never imports lightning.pytorch."""
    copy_renamed(tmp_path)
    (tmp_path / "tests" / "test_imports.py").write_text(
        "import sys\n\ndef test_no_module_of_lightning():\n"
        "    assert 'pytorch_lightning' in sys.modules and 'lightning' not in sys.modules\n"
    )
    # These compare both packages, or read files beside the tests.
    without = [
        f"--ignore-glob=*/test_{name}.py" for name in ("attributes", "fabric", "front_ends", "optimizers_of_packages")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *without, *chosen]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_modules_that_exist_once_import_no_lightning() -> None:
    package = Path(lightning_ptm.__file__).parent
    for path in package.rglob("*.py"):
        inner = path.relative_to(package).with_suffix("").parts
        if inner[0] not in (*theirs._LOADED_AGAIN, "pytorch_lightning"):
            assert not re.search(r"(?m)^(?:import|from) lightning\b", path.read_text()), path

"""Imports: the command line's help and `import lightning_ptm` without torch, names as if all were imported."""

from __future__ import annotations

import ast
import inspect
import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from lightning.pytorch import Trainer, strategies
from lightning.pytorch.cli import LightningCLI

import lightning_ptm
from lightning_ptm.cli import COMMANDS, main
from lightning_ptm.config import Settings
from lightning_ptm.trainer.registered import NAMES

HEAVY = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "numpy", "torchmetrics", "tqdm", "matplotlib")
LIGHT = [["--help"], ["-h"], ["--version"], *([name, "--help"] for name in COMMANDS), ["plan"], ["plan", "--nosuch"]]


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_help_and_version_import_neither_torch_nor_lightning() -> None:
    script = """
        import contextlib, io, json, sys
        from lightning_ptm.cli import main
        heavy, found = sys.argv[2].split(), {}
        for arguments in json.loads(sys.argv[1]):
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
                try:
                    main(arguments)
                except SystemExit:
                    pass
            assert len(out.getvalue()) > 20, (arguments, out.getvalue())
            found[" ".join(arguments)] = [name for name in heavy if name in sys.modules]
        print(json.dumps(found))
    """
    assert json.loads(run(script, json.dumps(LIGHT), " ".join(HEAVY))) == {" ".join(line): [] for line in LIGHT}


def test_the_help_has_a_line_for_each_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    first, last = (lines.index(line) for line in ("commands (each with its own --help):", "options:"))
    described = dict(line.split(maxsplit=1) for line in lines[first + 1 : last - 1])
    assert list(described) == [*LightningCLI.subcommands(), *COMMANDS]
    assert all(line.endswith(".") for line in described.values())
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_shows_what_the_command_reads(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    parameters = inspect.signature(COMMANDS[name]).parameters
    assert {word.strip(",") for word in text.split() if word.startswith("--")} <= {
        *(f"--{parameter}" for parameter in parameters),
        *("--help", "--quick`", "--hardware`.", "--nproc-per-node", "--disk+"),  # named in descriptions, or a list's
    }
    assert not [parameter for parameter in parameters if parameter not in text]


def test_public_names_are_those_that_type_checkers_read() -> None:
    tree = ast.parse(Path(lightning_ptm.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    read = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert read == lightning_ptm._HOME_OF
    assert sorted(lightning_ptm.__all__) == sorted([*read, "__version__"])


def test_public_names_are_found_by_completion_by_star_and_by_pickle() -> None:
    assert set(lightning_ptm.__all__) <= set(dir(lightning_ptm))
    names: dict[str, object] = {}
    exec("from lightning_ptm import *", names)
    assert set(lightning_ptm.__all__) <= set(names)
    for name in set(lightning_ptm.__all__) - {"__version__"}:
        assert pickle.loads(pickle.dumps(names[name])) is getattr(lightning_ptm, name)


def test_modules_are_attributes_of_the_package_and_nothing_else_is() -> None:
    assert lightning_ptm.errors.ConfigError is lightning_ptm.ConfigError
    assert lightning_ptm.__getattr__("sharded").load is not None
    for name in ("nosuch", "__wrapped__", "_private"):
        with pytest.raises(AttributeError, match=f"module 'lightning_ptm' has no attribute '{name}'"):
            getattr(lightning_ptm, name)
    with pytest.raises(ImportError, match="cannot import name 'Nosuch'"):
        exec("from lightning_ptm import Nosuch")


def test_each_name_of_the_registry_makes_the_strategy_with_its_settings() -> None:
    for name, named in NAMES.items():
        strategy = strategies.StrategyRegistry.get(name)
        assert type(strategy) is lightning_ptm.AngelPTMStrategy
        assert strategy.settings == Settings(**named.settings)
        assert strategies.StrategyRegistry[name]["description"] == named.description
    assert set(NAMES) <= set(strategies.StrategyRegistry.available_strategies())


@pytest.mark.parametrize("first", ["lightning.pytorch.strategies", "lightning_ptm"])
def test_names_are_offered_whoever_is_imported_first_and_nothing_else_is_imported(tmp_path: Path, first: str) -> None:
    """Imports with a stand-in for Lightning, which takes seconds to import; the next test has the real one."""
    package = tmp_path / "lightning" / "pytorch"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "strategies.py").write_text(
        "class Registry(dict):\n"
        "    def register(self, name, strategy, description, override, **settings):\n"
        "        self[name] = settings\n"
        "StrategyRegistry = Registry()\n"
    )
    script = """
        import importlib, json, sys
        sys.path.insert(0, sys.argv[1])
        importlib.import_module(sys.argv[2])
        import lightning_ptm
        from lightning.pytorch.strategies import StrategyRegistry
        assert "torch" not in sys.modules and "lightning_ptm.trainer.strategy" not in sys.modules
        print(json.dumps(StrategyRegistry))
    """
    assert json.loads(run(script, str(tmp_path), first)) == {
        name: dict(named.settings) for name, named in NAMES.items()
    }


@pytest.mark.slow
def test_a_config_names_our_models_without_their_module(tmp_path: Path) -> None:
    config = tmp_path / "gpt.yaml"
    config.write_text("model: {class_path: T5, init_args: {width: 64, layers: 1, heads: 2}}\n")
    script = """
        import sys
        from lightning_ptm.cli import main
        main(["params", sys.argv[1]])
    """
    assert "units" in run(script, str(config))


@pytest.mark.slow
def test_a_trainer_knows_the_names_after_the_import_of_the_package_alone() -> None:
    script = """
        import sys
        import lightning_ptm
        assert "torch" not in sys.modules
        from lightning.pytorch import Trainer
        assert "lightning_ptm.trainer.strategy" not in sys.modules
        trainer = Trainer(strategy="angel_ptm_disk", accelerator="cpu", devices=1, logger=False)
        assert type(trainer.strategy) is lightning_ptm.AngelPTMStrategy
        from lightning.pytorch.cli import LightningCLI
        from jsonargparse import ArgumentParser
        from lightning.pytorch.strategies import Strategy
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(Strategy, "strategy")
        given = parser.parse_args(["--strategy=AngelPTMStrategy"])
        from lightning.pytorch import LightningModule
        import lightning_ptm.command_line
        parser.add_subclass_arguments(LightningModule, "model")
        given = parser.parse_args(["--strategy=AngelPTMStrategy", "--model=T5MoE"])
        print(given.strategy.class_path, given.model.class_path)
    """
    assert run(script) == "lightning_ptm.AngelPTMStrategy lightning_ptm.models.T5MoE"


def test_a_trainer_has_the_strategy_of_a_name() -> None:
    trainer = Trainer(strategy="angel_ptm_lock_free", accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, lightning_ptm.AngelPTMStrategy)
    assert trainer.strategy.settings.lock_free


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_refused_in_a_sentence(platform: str) -> None:
    script = f"import sys; sys.platform = {platform!r}; import lightning_ptm"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: lightning_ptm needs Linux") and platform in last and "WSL2" in last

"""The command line, `lightning-ptm` (`python main.py` in a checkout): dispatch, and the commands that are not the Trainer's.

`main` runs one of COMMANDS, whose parameters and docstring are its command line and help, or hands over to LightningCLI
(command_line.py). torch, Lightning and the modules of a command are imported when they are needed, so that help and the
version are printed at once.
"""

from __future__ import annotations

import difflib
import inspect as introspection
import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib.metadata import version
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import lightning_ptm
from lightning_ptm.commands.config_names import names_module
from lightning_ptm.commands.garbage import without_collections
from lightning_ptm.config import format_bytes
from lightning_ptm.errors import AngelPTMError, ConfigError, some

if TYPE_CHECKING:
    from lightning_ptm.forecasting.rates import Activity

_TRAINER_COMMANDS = {
    "fit": "Trains a model.",
    "validate": "Evaluates a model on its validation data.",
    "test": "Evaluates a model on its test data.",
    "predict": "Runs a model on its prediction data.",
}
"""LightningCLI's subcommands."""


_WITHOUT_COLLECTIONS = ("params", "plan")
"""Commands that end in seconds, of which imports take most."""


def main(args: Sequence[str] | None = None) -> None:
    """The console script: runs one of COMMANDS, or a subcommand of LightningCLI. Our own errors end it with status 1."""
    arguments = list(sys.argv[1:] if args is None else args)
    _find_modules_of_the_current_folder()
    commands = [*_TRAINER_COMMANDS, *COMMANDS]
    options = list(itertools.takewhile(lambda each: each not in commands, arguments))
    if arguments and arguments[0] in _WITHOUT_COLLECTIONS:
        with without_collections():
            _run(*arguments)
    elif arguments and arguments[0] in COMMANDS:
        _run(*arguments)
    elif {"-h", "--help"} & set(options):
        print(_help(), end="")
    elif "--version" in options:
        print(f"lightning-ptm {lightning_ptm.__version__} (torch {version('torch')}, lightning {version('lightning')})")
    elif arguments[:1] == ["--print_completion"]:
        _print_completion(arguments[1:])
    elif not arguments:
        _refuse(f"give a command: {', '.join(commands)}")
    elif not arguments[0].startswith("-") and arguments[0] not in commands:
        near = difflib.get_close_matches(arguments[0], commands, n=1)
        instead = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(commands)}"
        _refuse(f"there is no command {arguments[0]!r}; {instead}")
    else:
        from lightning_ptm.command_line import run_trainer

        run_trainer(None if args is None else arguments, _TRAINER_COMMANDS)


def _help() -> str:
    """The help of the console script: a line for each command."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = {**_TRAINER_COMMANDS, **{name: introspection.getdoc(command) or "" for name, command in COMMANDS.items()}}
    firsts = {name: text.partition("\n")[0] for name, text in lines.items()}
    return _HELP.format(
        commands="\n".join(
            textwrap.fill(first, width, initial_indent=f"  {name:<11}", subsequent_indent=" " * 13)
            for name, first in firsts.items()
        )
    )


_HELP = """\
usage: lightning-ptm COMMAND ...

Trains models larger than GPU and RAM with PyTorch Lightning.

commands (each with its own --help):
{commands}

options:
  -h, --help               Prints this help.
  --version                Prints the versions of lightning-ptm, torch and Lightning.
  --print_completion bash  Prints a script for completion in bash:
                           lightning-ptm --print_completion bash > ~/.lightning-ptm.bash
                           echo 'source ~/.lightning-ptm.bash' >> ~/.bashrc
"""


def _print_completion(shell: Sequence[str]) -> None:
    if list(shell) != ["bash"]:
        _refuse("the script is for bash: lightning-ptm --print_completion bash; zsh reads it after bashcompinit")
    from lightning_ptm.command_line import trainer_parsers
    from lightning_ptm.commands.completion import bash_script

    print(bash_script(trainer_parsers(), COMMANDS), end="")


def _find_modules_of_the_current_folder() -> None:
    """Makes `--model=my_module.Net` find `my_module.py` in the current folder, as `python -m` would, unless Python runs with
    `-P`. The import path of a console script begins with the script's own folder instead."""
    folder = os.getcwd()
    if not sys.flags.safe_path and not {"", folder} & set(sys.path):
        sys.path.insert(0, folder)


def _run(name: str, *given: str) -> None:
    from lightning_ptm.commands.command_parser import CommandParser
    from lightning_ptm.commands.mistakes import as_options

    command = COMMANDS[name]
    try:
        command(**CommandParser(name, command).arguments(given))
        sys.stdout.flush()
    except AngelPTMError as error:
        sys.exit(f"lightning-ptm {name}: {as_options(str(error), '--strategy.') if name == 'plan' else error}")
    except BrokenPipeError:  # the reader, such as `head`, has ended; what is left in the buffer has no reader either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _refuse(problem: str) -> NoReturn:
    print(f"lightning-ptm: {problem} (see lightning-ptm --help)", file=sys.stderr)
    sys.exit(2)


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    shard_size: str = "5GB",
    strip: str | None = None,
    weights_only: bool = True,
) -> None:
    """Writes a checkpoint's weights as safetensors files.

    `from_pretrained` loads them. A tensor with several names (tied weights) is written once, under the first of them. Memory
    use does not grow with the model, checksums are verified while reading, and the folder appears only when it is complete.

    Args:
        checkpoint: a sharded checkpoint (a folder), or a full one (a file).
        out: the folder to write, new or empty.
        dtype: fp32, bf16 or fp16, for floating point tensors; by default as they were saved.
        shard_size: larger models are written in files of at most this size, with an index.
        strip: export only what is below this name, and leave the name out: `model` where the LightningModule has the
            Hugging Face model as self.model.
        weights_only: false loads a checkpoint with objects of any class, which can run code: only for one that you trust.
    """
    from lightning_ptm.checkpoints import pretrained
    from lightning_ptm.checkpoints.formats import open_checkpoint
    from lightning_ptm.progress import Progress

    wanted = None if dtype is None else pretrained.parse_dtype(dtype)
    opened = open_checkpoint(checkpoint, weights_only=weights_only)
    plan = pretrained.plan(opened, dtype=wanted, shard_size=shard_size, strip=strip)
    with Progress().bar("export", plan.size_bytes) as seen:
        infinite = pretrained.write(opened, plan, out, seen=seen)
    for name, kept in plan.dropped.items():
        print(f"tied: {name} is {kept}, and written under that name only")
    if plan.left_out:
        print(f"left out, not below {strip}: {some(plan.left_out)}")
    if plan.others:
        print(f"left out, no tensors: {some(plan.others)}")
    if not opened.has_checksums:
        print("the checkpoint was saved without checksums, so damage to it would not have been found")
    for name, count in infinite.items():
        print(f"warning: {count} values of {name} are beyond {dtype} and became infinite; bf16 and fp32 reach further")
    dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in plan.entries})
    files = len(plan.shards)
    print(
        f"{out}: {len(plan.entries)} tensors, {format_bytes(plan.size_bytes)} in {files} file{'s' * (files > 1)}, "
        f"{', '.join(dtypes)}"
    )


def inspect(checkpoint: Path, *, verify: bool = True, weights_only: bool = True) -> None:
    """Prints what a checkpoint contains, and verifies its checksums.

    Ends with status 1 if they differ, or if there is no readable checkpoint.

    Args:
        checkpoint: a sharded checkpoint (a folder), or a full one (a file).
        verify: read all of it to compare checksums; false reads names and sizes only.
        weights_only: false loads a checkpoint with objects of any class, which can run code: only for one that you trust.
    """
    from lightning_ptm.checkpoints.formats import open_checkpoint
    from lightning_ptm.checkpoints.opened import describe
    from lightning_ptm.progress import Progress

    opened = open_checkpoint(checkpoint, weights_only=weights_only)
    print(describe(opened))
    print()
    if not verify:
        print("not verified")
    elif not opened.has_checksums:
        print("it opens, and cannot be verified further: it was saved without checksums")
    else:
        with Progress().bar("verify", opened.size_bytes) as seen:
            opened.check(seen)
        files = opened.file_count
        size = f"{format_bytes(opened.size_bytes)} in {files} file{'s' * (files > 1)}"
        print(f"verified: {size}, {opened.verified}")


def params(config_file: str) -> None:
    """Counts a config's parameters and the bytes of its model states, without building the model.

    Args:
        config_file: A config file of `fit`; a bare name is looked up among the installed ones.
    """
    from lightning_ptm.commands.params import count, render

    print(render(Path(config_file).name, count(config_file)))


def plan_command(
    config_file: str,
    hardware: str | None = None,
    nodes: int = 1,
    batch_size: str | int | None = None,
    strategy: dict[str, Any] | None = None,
    device_memory: str | None = None,
    largest: str | None = None,
    json: bool = False,
    timeline: Path | None = None,
    plot: Path | None = None,
    devices: int | None = None,
    ram: str | None = None,
    disk: str | None = None,
    precision: str | None = None,
    batch: str | None = None,
    dtype: str | None = None,
    init: dict[str, Any] | None = None,
    disk_tbw: str | None = None,
    endurance: str | None = None,
    parallel: Literal["auto"] | None = None,
    most: int = 24,
) -> None:
    """Tells whether a model fits on machines that you do not have, or on this one, and how fast a step would be.

    Ends with status 1 if it does not fit, after what would fit. Operations and activations are estimated by a forward on the
    meta device, and a backward counts as two. Whether callbacks read gradients is not considered.

    Args:
        config_file: a config file of `fit`, of which a bare name is looked up among the installed ones; or a model of yours,
            `my_package.my_module:MyModel`: a class, a function that returns a module, or a module.
        hardware: such as `rtx4090`: a name in configs/hardware/, or the path of a hardware file; by default this machine,
            measured as `lightning-ptm probe --quick` does (without `--quick` it takes longer and is more exact).
        nodes: machines of this kind.
        batch_size: samples a rank; `auto` finds the largest that fits; by default those of the batch.
        strategy: settings of the strategy in place of the config's, such as '{disk_path: /any, lock_free: true}'.
        device_memory: the strategy's setting, or found among sixteenths of a device's memory: `best` for the most
            samples/s, `least` for the most room for activations.
        largest: an argument of the config's model, such as `layers`: finds its largest value that fits.
        json: print JSON instead.
        timeline: a file for the simulated step, for chrome://tracing and ui.perfetto.dev.
        plot: a PNG file for a picture: memory of each tier over ticks, and what was busy over the step.
        devices: devices of a machine; by default those of the hardware file.
        ram: RAM of a machine, such as `64GiB`, in place of the file's.
        disk: a disk that pages may use: a size, a rate or both, such as '2TB, 3GB/s'.
        precision: the Trainer's, such as `bf16-mixed`; by default the config's, or `32-true`.
        batch: shapes of a batch for a model of yours: `8x2048:int64`, or `input_ids=8x2048:int64,labels=8x2048:int64`.
        dtype: of shapes that do not name theirs; by default float32.
        init: arguments of a class or function of yours: `--init.width=1024`.
        disk_tbw: bytes that may be written to each disk by its rating, such as `600TB`; by default 600 times its size.
        endurance: how long the disk has to last, such as `3y`, `26w` or `90d`: if it does not, the report has changes with
            which it would, and what they cost.
        parallel: `auto` lists the fastest divisions of the ranks (data, tensor, context, expert and pipeline parallelism),
            with what is recomputed and offloaded, and why. What the config or `strategy` sets stays. All have as many samples
            a step; with `--batch-size auto` each has the largest batch that fits.
        most: most runs that `parallel` predicts.
    """
    from lightning_ptm.commands.own_module import named
    from lightning_ptm.commands.picture import draw_plan
    from lightning_ptm.commands.plan import Where, choice_of_config, choice_of_module, forecast_config, forecast_module
    from lightning_ptm.commands.sample_batch import meta_batch
    from lightning_ptm.commands.timeline import check_timeline, write_timeline
    from lightning_ptm.drawing import check_target, save
    from lightning_ptm.forecasting.prediction import render

    if plot is not None:
        check_target(plot, "plot")
    if timeline is not None:
        check_timeline(timeline)
    record: list[Activity] | None = [] if timeline is not None or plot is not None else None
    where = Where(hardware, devices, nodes, ram, disk)
    if disk_tbw is not None:
        strategy = {**(strategy or {}), "disk_tbw": disk_tbw}
    trainer = {} if precision is None else {"precision": precision}
    if parallel is not None:
        asked = {"--device-memory": device_memory, "--largest": largest, "--timeline": timeline, "--plot": plot}
        asked["--endurance"] = endurance
        if others := [option for option, value in asked.items() if value is not None]:
            raise ConfigError(
                f"{' and '.join(others)} with --parallel auto: the latter compares many runs, and the former are about one; "
                f"leave them out, then plan the run with the settings that it prints"
            )
    if names_module(config_file):
        if batch is None:
            raise ConfigError(f"{config_file} needs the shapes of a batch; give them, as in --batch 8x2048:int64")
        if largest is not None:
            raise ConfigError(f"--largest is for configs, and {config_file} is none; give sizes as --init.NAME=VALUE")
        module = named(config_file, init or {})
        if parallel is not None:
            _print_choice(
                choice_of_module(module, meta_batch(batch, dtype), where, batch_size, strategy, trainer, most),
                json,
            )
            return
        found, blueprint = forecast_module(
            module, meta_batch(batch, dtype), where, batch_size, strategy, trainer, record, device_memory, endurance
        )
    else:
        if batch is not None or dtype is not None or init is not None:
            raise ConfigError(
                f"--batch, --dtype and --init are for a model of yours (my_module:MyModel), and {config_file} is a "
                f"config, which has its own; give --batch-size, or change the config"
            )
        if parallel is not None:
            _print_choice(choice_of_config(config_file, where, batch_size, strategy, trainer, most), json)
            return
        found, blueprint = forecast_config(
            config_file, where, batch_size, strategy, trainer, record, device_memory, largest, endurance
        )
    print(dumps(found.to_dict(), indent=2) if json else render(found, options=True))
    if plot is not None and blueprint is not None:
        save(draw_plan(found, blueprint, record or []), plot)
        if not json:
            print(f"picture: {plot}")
    if not found.fits:
        sys.exit(1)
    if timeline is not None and record is not None and blueprint is not None:
        write_timeline(timeline, record, [unit.name or "root" for unit in blueprint.units])
        if not json:
            print(f"timeline of a step: {timeline}")


def _print_choice(choice: Any, json: bool) -> None:
    # Any, not Choice: the parser imports the modules of all annotations of this file, and that one imports torch.
    print(dumps(choice.to_dict(), indent=2) if json else choice)


def probe(disk: str | list[str] | None = None, quick: bool = False) -> None:
    """Measures this machine, for `lightning-ptm plan --hardware`.

    Prints a hardware file. Run it on an otherwise idle machine. Collectives are measured between the ranks that torchrun
    launches, as in `torchrun --nproc-per-node 2 $(which lightning-ptm) probe`, also over several nodes.

    Args:
        disk: folder for the disk tier, or a list of several; without it the machine counts as one without a disk.
        quick: smaller trials: takes one second instead of some, and is less exact.
    """
    from lightning_ptm.commands.probe import launched_measure

    paths = [disk] if isinstance(disk, str) else disk or []
    text = launched_measure(tuple(map(Path, paths)), quick=quick)
    if text is not None:
        print(text)


COMMANDS: dict[str, Callable[..., None]] = {
    "export": export,
    "inspect": inspect,
    "params": params,
    "plan": plan_command,
    "probe": probe,
}
"""Commands by name. Their parameters are their options, the first line of their docstring is in the help."""

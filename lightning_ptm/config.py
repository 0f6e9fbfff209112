"""The user's settings: parsed and checked once, before anything is built.

Knows the standard library only. I1: a `Settings` object that exists is valid. I2: what is `auto` here is decided by the
engine from the machine; nothing else reads the machine. I3: a setting that depends on another one is a field of the same
nested dataclass, so it cannot be given without it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from lightning_ptm.errors import ConfigError, InternalError
from lightning_ptm.errors import format_bytes as format_bytes
from lightning_ptm.setting_hints import unknown_setting
from lightning_ptm.terms import BLOCK_BYTES, SEVERAL_CHUNKS, TIERS, Tier, is_page_size

DEFAULT_PAGE_BYTES = 4 << 20
_LEAST_RATED_BYTES = 10**12

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

Home = Literal["auto", "device", "host", "disk"]
StateDtype = Literal["auto", "bf16", "int8"]
Slices = int | Mapping[str, int | tuple[Literal["tokens"], int | Literal["auto"]]]


def parse_bytes(value: str | int, *, name: str) -> int:
    """Reads `"4MiB"`, `"1.5GB"` or a plain number of bytes.

    Raises:
        ConfigError: the text is no size, or it is negative.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(
            f"{name}={value!r} is not a size; write a number of bytes or a text such as '4MiB' or '1.5GB'"
        )
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", str(value).lower())
    unit = match.group(2) if match else ""
    if unit in ("k", "m", "g", "t"):
        unit += "ib"
    if match is None or unit not in _UNITS:
        raise ConfigError(
            f"{name}={value!r} is not a size; write a number of bytes or a text such as '4MiB' or '1.5GB'"
        )
    return int(float(match.group(1)) * _UNITS[unit])


def _as_given(settings: Any, name: str) -> str:
    """A setting with its value, as one writes it: `recompute='all'`, `lock_free=LockFree(max_staleness=2)`."""
    written = f"{name}={getattr(settings, name)!r}"
    for outer, cls in NESTED.items():
        if type(settings) is cls:
            return f"{outer}={cls.__name__}({written})"
    return written


def _check_switches(settings: Any) -> None:
    """Raises ConfigError where a field whose default is a bool has another value: the text "false" would count as true."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise ConfigError(f"{_as_given(settings, field.name)} is neither on nor off; give True or False")


def _check_words(settings: Any) -> None:
    """Raises ConfigError where a field whose type is a `Literal` has another value."""
    for name, hint in get_type_hints(type(settings)).items():
        words = get_args(hint)
        if words and all(isinstance(word, str) for word in words) and getattr(settings, name) not in words:
            listed = ", ".join(map(repr, words[:-1]))
            raise ConfigError(f"{_as_given(settings, name)}: use {listed} or {words[-1]!r}")


_Class = TypeVar("_Class", bound=type)


def _naming_unknown_settings(cls: _Class) -> _Class:
    """Class decorator for nested settings: a name that does not exist is a ConfigError with a similar one."""
    init = cls.__init__  # type: ignore[misc]
    known = [field.name for field in dataclasses.fields(cls)]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                raise ConfigError(f"{cls.__name__} has no setting {name!r}; {_similar(name, known)}")
        init(self, *args, **values)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def _check_steps(settings: Any, *names: str) -> None:
    for name in names:
        steps = getattr(settings, name)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ConfigError(f"{_as_given(settings, name)}: give a number of steps, 0 or more")


@_naming_unknown_settings
@dataclasses.dataclass(frozen=True, kw_only=True)
class LockFree:
    """Lock-free updates (section 4.3 of the paper): compute goes on while optimizer states stream through the disk.

    Args:
        max_staleness: How many optimizer steps a parameter in use may lag behind; compute waits rather than exceed it.
            0 gives the numbers of a synchronous run.
        warmup_steps: The first so many optimizer steps of a training wait for their updates, with the numbers of a
            synchronous run. A run that goes on from a checkpoint counts the steps before it. Staleness costs most in the
            first steps, when the loss falls fastest.
        predict_weights: Parameters in use are changed as up to two missing updates are expected to change them (Adam,
            AdamW and SGD). Each gradient is still applied once, to the exact parameters. A staleness of one or two steps
            then costs next to nothing in loss.
    """

    max_staleness: int = 1
    warmup_steps: int = 0
    predict_weights: bool = True

    def __post_init__(self) -> None:
        _check_steps(self, "max_staleness", "warmup_steps")
        _check_switches(self)
        if self.warmup_steps and not self.max_staleness:
            raise ConfigError(
                f"LockFree(max_staleness=0, warmup_steps={self.warmup_steps}): the first steps of a warm-up wait for their "
                f"updates, and with a staleness of 0 all steps do, so it has no effect; leave warmup_steps out, or give a "
                f"max_staleness of 1 or more"
            )


@_naming_unknown_settings
@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Pretrained weights, read from their files straight into pages at the start of the first run with a module.

    Args:
        path: A safetensors file, a folder with `model.safetensors` or with shards and `model.safetensors.index.json`, or a
            sharded checkpoint. A checkpoint that is given to the run is loaded over them.
        key_mapping: Which name in the files is which in the module: a dictionary of prefixes ("prefix in the files": "prefix
            in the module"; the longest counts, null leaves names out, "" is the prefix of all), or a function (name -> name,
            or None). By default one prefix that suits the names is found and put before all of them.
        allow_missing: Names of the module, with wildcards, that the files need not have (adapters, a new head).
        strict: Whether files that lack another name of the module, or have names that it lacks, are refused; if not, what
            is missing is initialised as usual, with a warning that lists it.
    """

    path: str | Path
    key_mapping: Mapping[str, str | None] | Callable[[str], str | None] | None = None
    allow_missing: Sequence[str] = ()
    strict: bool = True

    def __post_init__(self) -> None:
        _check_switches(self)
        if not isinstance(self.path, (str, Path)) or not str(self.path):
            raise ConfigError(f"weights={self.path!r}: give the path of a safetensors file or of a folder with some")
        if isinstance(self.key_mapping, Mapping):
            # jsonargparse passes the null of a dotted option as a text, and no module can have this name in Python.
            given = {key: None if value == "None" else value for key, value in self.key_mapping.items()}
            object.__setattr__(self, "key_mapping", given)
        pairs = self.key_mapping.items() if isinstance(self.key_mapping, Mapping) else ()
        of_prefixes = all(isinstance(key, str) and (value is None or isinstance(value, str)) for key, value in pairs)
        if not of_prefixes or not (
            self.key_mapping is None or isinstance(self.key_mapping, Mapping) or callable(self.key_mapping)
        ):
            raise ConfigError(
                f"Weights(key_mapping={self.key_mapping!r}): give a dictionary such as "
                f"{{'transformer': 'model.transformer'}}, where None leaves names out, or a function from a name in "
                "the files to a name in the module"
            )
        named = isinstance(self.allow_missing, Sequence) and not isinstance(self.allow_missing, str)
        if not named or not all(isinstance(name, str) for name in self.allow_missing):
            raise ConfigError(
                f"Weights(allow_missing={self.allow_missing!r}): give a list of names such as ['*.lora_*']"
            )


@_naming_unknown_settings
@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Settings of checkpoints: how they are written, and which one a fit resumes from.

    Args:
        state_dict_type: `full` checkpoints are one ordinary Lightning file, with all states gathered on rank 0 as it is
            written; `sharded` ones are a folder of safetensors files, written by all ranks straight from their pages.
        async_save: Training goes on while a sharded checkpoint is written: an update copies what it is about to change
            first. Copies take at most an eighth of the free RAM; updates wait when it is used up.
        on_failure: What happens when a checkpoint cannot be written: `stop` the run with the error, or `warn` and go on.
            Earlier checkpoints are kept either way.
        resume: `auto`: a fit without a `ckpt_path` goes on from the newest complete checkpoint, full or sharded, in the
            folders of the Trainer's checkpoint callbacks, or from scratch if there is none; so a run that was killed is
            started again by the same command. `never`: only from a checkpoint that it is given.
    """

    state_dict_type: Literal["full", "sharded"] = "full"
    async_save: bool = False
    on_failure: Literal["stop", "warn"] = "stop"
    resume: Literal["never", "auto"] = "never"

    def __post_init__(self) -> None:
        _check_switches(self)
        _check_words(self)
        if self.async_save and not self.from_pages:
            raise ConfigError(
                "Checkpoints(async_save=True) writes checkpoints from pages, and Checkpoints(state_dict_type='full') "
                "gathers them first, so it has no effect; use Checkpoints(state_dict_type='sharded', "
                "async_save=True), or Checkpoints(async_save=False)"
            )

    @property
    def from_pages(self) -> bool:
        """Whether ranks write their own pages, so that a checkpoint has one set of weights, in the order of their memory;
        otherwise rank 0 writes a state dict that is gathered from all pages."""
        return self.state_dict_type == "sharded"


@_naming_unknown_settings
@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Settings of tensor parallelism, for a `tensor_parallel_size` of 2 or more.

    Args:
        plan: A dictionary from names of modules (with `*` for numbers) to styles of `lightning_ptm.parallel`
            (`ColwiseParallel`, `RowwiseParallel`, `VocabParallel`, `Partial`, `Summed`), or Transformers' words for them.
            `auto` takes the plan that the model's classes have: this package's models do, and Transformers'.
        sequence_parallel: Between the layers that are cut (norms, dropout, residuals), each rank of a group computes its
            part of the sequence, and keeps the activations of that part alone. Blocks take and return whole sequences. Each
            rank draws random numbers of its own for its part.
        overlap: `two_batches`: each training step computes its batch in two halves, in turns, and sums over the ranks of one
            half pass while the other one computes. The loss is the mean of the halves', as with accumulation. It pays if
            sums take long: between machines, not on the CPUs of one machine.
    """

    plan: Literal["auto"] | Mapping[str, Any] = "auto"
    sequence_parallel: bool = False
    overlap: Literal["none", "two_batches"] = "none"

    def __post_init__(self) -> None:
        _check_switches(self)
        if self.overlap not in ("none", "two_batches"):
            raise ConfigError(f"TensorParallel(overlap={self.overlap!r}): use 'none' or 'two_batches'")
        if self.in_halves and self.sequence_parallel:
            raise ConfigError(
                "TensorParallel(overlap='two_batches', sequence_parallel=True): one half of a batch computes during "
                "all-reduces of the other, and with sequence_parallel there are all-gathers and reduce-scatters in their "
                "place; use one of the two"
            )
        if self.plan != "auto" and not isinstance(self.plan, Mapping):
            raise ConfigError(
                f"TensorParallel(plan={self.plan!r}): give 'auto', or a dictionary such as "
                f"{{'blocks.*.expand': ColwiseParallel(), 'blocks.*.project': RowwiseParallel()}} (from "
                "lightning_ptm.parallel)"
            )

    @property
    def in_halves(self) -> bool:
        """Whether training steps compute two halves of each batch."""
        return self.overlap == "two_batches"


@_naming_unknown_settings
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings for speed and memory use. The defaults suit nearly every run.

    Args:
        staging_memory: Bytes of RAM for pages between disk and update; `auto` picks a few dozen pages.
        freed_memory: On a CPU, what becomes of the memory of activations when a step has freed it: `keep` it for the next
            step (faster), `return` it to the system (smaller), or `auto`: return it where something is on disk and
            pages take a quarter of the free RAM or more, else keep it; with all in RAM, keep large blocks (32 MiB and more)
            only in a mixed precision, whose gradients take half as much as without pages.
        matmul_precision: On a CPU, how matrix products, attention and convolutions of 16-bit tensors are computed: `native`
            by torch's own kernels, `fp32` in fp32 and rounded once, or `auto`: natively unless the processor has no
            16-bit arithmetic, where that takes 10 to 100 times as long. Pages and all other operators stay 16-bit; units
            are then computed without torch.compile.
        reduce_gradients: With several ranks and accumulation: `each_backward` reduces (and so shards) gradients after every
            micro-batch; `each_step` sums unsharded gradients on each rank and reduces them once a step: less traffic,
            at the cost of 2 bytes of memory per parameter outside pages. The results differ by rounding.
        restore_weights: After a run, put full weights back into the module's parameters if RAM holds them; else those that
            were trained, and if it does not hold these, write them to disk.
    """

    staging_memory: str | int = "auto"
    freed_memory: Literal["auto", "keep", "return"] = "auto"
    matmul_precision: Literal["auto", "native", "fp32"] = "auto"
    reduce_gradients: Literal["each_backward", "each_step"] = "each_backward"
    restore_weights: bool = True

    def __post_init__(self) -> None:
        _check_switches(self)
        _check_words(self)
        _check_memory(self, "staging_memory")

    @property
    def staging_bytes(self) -> int | None:
        """None means auto."""
        return _bytes_or_none(self, "staging_memory")


@_naming_unknown_settings
@dataclasses.dataclass(frozen=True, kw_only=True)
class Debug:
    """Aids that make a fault show, at the cost of speed.

    Args:
        poison: Fill released pages with NaN, and compare all of a weight's copy, not a sample, with what it was when it was
            fetched: a read of released memory shows, and so does a write that would be lost.
    """

    poison: bool = False

    def __post_init__(self) -> None:
        _check_switches(self)


_Nested = TypeVar("_Nested", LockFree, Weights, Checkpoints, TensorParallel, Tuning, Debug)
NESTED: Mapping[str, type[Any]] = {
    "lock_free": LockFree,
    "weights": Weights,
    "checkpoints": Checkpoints,
    "tensor_parallel": TensorParallel,
    "tuning": Tuning,
    "debug": Debug,
}
"""By name of a setting, the class of its nested settings."""


def _bytes_or_none(settings: Any, name: str) -> int | None:
    """The size in a field, in bytes; None for `auto`."""
    value = getattr(settings, name)
    return None if value == "auto" else parse_bytes(value, name=name)


def _check_memory(settings: Any, name: str) -> None:
    size = _bytes_or_none(settings, name)
    if size is not None and 0 < size < BLOCK_BYTES:
        raise ConfigError(
            f"{_as_given(settings, name)} is {size} bytes, which hold no page (did you mean '{size}GiB'?); give sizes with "
            f"their unit"
        )


def _similar(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"


def _build(cls: type[_Nested], name: str, value: Any) -> _Nested:
    """The nested settings of field `name`, from what the user gave: an object, or a dictionary of its fields."""
    if isinstance(value, cls):
        return value
    known = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(value, Mapping):
        hints = get_type_hints(cls)
        takes = next((field for field in known if value in get_args(hints[field])), None)
        if takes is not None:
            raise ConfigError(f"{name}={value!r} names no setting; give {name}={cls.__name__}({takes}={value!r})")
        raise ConfigError(
            f"{name}={value!r}: give lightning_ptm.{cls.__name__}({known[0]}=...), or a dictionary with {', '.join(known)}"
        )
    for key in value:
        if key not in known:
            raise ConfigError(f"{name} has no setting {key!r}; {_similar(str(key), known)}")
    if cls is Weights and "path" not in value:
        raise ConfigError(
            f"weights={dict(value)!r} names no files; give Weights(path='/a/folder') with safetensors files"
        )
    return cls(**value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a user can set on `AngelPTMStrategy`, with its default.

    Args:
        page_size: Bytes of a page, the smallest amount that is allocated and moved: a multiple of 4096, at least 64 KiB.
            `auto` takes the smallest with which disk and device are about as fast as they can be, by a measurement of about
            a second at the start, on rank 0 for all; 4 MiB where there is neither. The numbers do not depend on it.
        device_memory: Bytes of the compute device that pages may take (per rank). `auto`: the least that works in the first
            training step, then what the step has left beside its activations; half of what is free in runs without training.
            On a CPU-only machine, giving a number makes a device tier apart from the host tier, so that all three tiers run;
            `auto` makes RAM the only one.
        host_memory: Bytes of RAM that pages may take (per rank). `auto` takes what the machine (or its memory cgroup)
            has free, less a reserve; where that is less than 4 GiB a rank, a quarter of it, or as much more as pages need.
        disk_path: Folder, or several, for the disk tier. Several are striped. The files never outlive the process. The
            last folder is made where it is missing; the one around it must exist, and it is not directly under the root,
            where disks are mounted.
        disk_memory: Bytes of the disk tier (per rank). `auto` takes what the plan needs.
        disk_tbw: Bytes that may be written to each disk by its rating (TBW in its data sheet), such as `600TB`; `auto` takes
            600 times its size. Changes no decision: a run and `plan` say how many steps the disk lasts.
        offload_parameters: Tier that holds the compute parameters between steps; `auto` lets the plan decide.
        offload_optimizer: Tier that holds fp32 parameters and optimizer states between steps; `auto` lets the plan decide.
        offload_activations: Where saved activations of units wait for the backward pass: `none` leaves them on the device,
            `host` copies them to page-locked RAM and back, on streams of their own (needs a device with memory of its own),
            `disk` writes them to `disk_path` behind the forward and reads them ahead of the backward. The numbers are the
            same. With `recompute`, the inputs from which units are recomputed go there. `auto` leaves them on the device as
            long as memory suffices, and otherwise chooses for each unit: to RAM, or to `disk_path` if there is one.
        optimizer_state_dtype: How optimizer states lie in pages: `auto`, as the optimizer computes them; `bf16`, 2 bytes an
            element; `int8`, 1 byte and a scale for each 64; or a dictionary from their names to these, such as
            `{"exp_avg": "bf16", "exp_avg_sq": "int8"}`. For any element-wise optimizer, which goes on computing in fp32;
            rounding is stochastic, so that small changes count. fp32 parameters stay: AdamW's 12 bytes a parameter become 8,
            or 6. Checkpoints hold fp32, and are those of any other run.
        frozen_dtype: In how many bits pages keep frozen matrices (`requires_grad=False`), but for those of the root unit and
            of embeddings: as they `compute`, or quantized to 8 (`int8`) or 4 bits (`nf4`, that of QLoRA), with a scale for
            each 64 elements. They are dequantized when their unit is fetched. What quantization rounds away is lost:
            checkpoints, and the module after the run, have the rounded values.
        recompute: Activations of which units are recomputed in the backward pass: `none`, `all`, `every 2nd`, `every 3rd` and
            so on, or `auto`: those for which memory does not suffice, unless ranks divide experts, or units are in `slices`.
        slices: Number of slices of a batch on which units are computed, one after another: a unit is fetched once for all of
            them, and only the activations of one slice are in memory. Units are recomputed in the backward pass. A dictionary
            from names of units (with `*`) to numbers, such as `{"layers.*": 8}`, has only these computed in slices. With
            `{"*.mlp": ("tokens", 16)}`, modules inside of units that compute each token alone are computed on slices of the
            tokens, and only the activations of one slice are in memory. `{"auto": ("tokens", "auto")}` finds such modules by
            a trial, and chooses the number.
        units: Class names of the modules that are fetched and released together; `auto` takes the elements of
            `ModuleList` and `Sequential`, that is, a transformer's blocks.
        parallel: `auto`: the first fit measures the machine and chooses the sizes below, `micro_batches`,
            `pipeline_schedule`, `TensorParallel.overlap`, `slices` and `recompute` for the most samples a second, before
            groups of ranks are made. What is not at its default stays. `none` chooses nothing.
        expert_parallel_size: Groups of so many ranks divide the experts of layers such as `models.moe.MixtureOfExperts`:
            each rank holds its part of them, tokens travel to the ranks that hold their experts and back, and an expert's
            pages are sharded over the ranks that hold it, one of each group. 1 divides nothing.
        context_parallel_size: Groups of so many ranks train on the same sequences, each on its part of the tokens, and
            exchange keys and values in attention. Activations of a rank are those of its tokens. 1 divides nothing. Modules
            take positions from `trainer.strategy.positions`; models of Transformers need no change. Checkpoints are those of
            a run without.
        context_parallel: With `context_parallel_size`, how attention sees all tokens: `gather` the keys and values of all
            ranks, `ulysses` (all tokens of some heads), `ring` (keys and values go round), or `auto`: of the first two the
            one that sends less.
        tensor_parallel_size: Groups of so many ranks compute the same batches, each with its parts of the linear layers that
            the plan of `tensor_parallel` names, and exchange activations. What is not cut is sharded over the ranks of a
            group, too, so each element of the model has one owner. 1 cuts nothing. Checkpoints are those of a run without.
        tensor_parallel: With `tensor_parallel_size`, how layers are cut: `TensorParallel(plan=..., sequence_parallel=...,
            overlap=...)`.
        pipeline_parallel_size: Groups of so many ranks compute the same batches, each its own blocks of the model (a stage),
            and hand hidden states on. A stage's blocks are sharded over the ranks of the stage, all else over all ranks. 1
            divides nothing. Checkpoints are those of a run without.
        micro_batches: With `pipeline_parallel_size`, in how many equal parts each batch goes through the stages.
        pipeline_schedule: With `pipeline_parallel_size`, the order of forward and backward passes of micro-batches: `1f1b`
            (a stage keeps the activations of at most as many micro-batches as there are stages), `gpipe` (of all),
            `interleaved` (each stage has several runs of blocks, which shortens the bubble), or `breadth_first` (all
            micro-batches go through a block before the next one, so that a block is fetched once in each direction; keeps
            all activations).
        pipeline_blocks: With `pipeline_parallel_size`, the number of blocks of each stage, in the model's order, such as
            `[9, 7]`; `auto`: stages have about equally many weights. `lightning-ptm plan` prints numbers that it expects to
            be faster. With `interleaved` and `breadth_first`, the number of blocks of each run of blocks, for equally many
            runs on each stage; runs go to the stages in turn. With `auto`, `interleaved` has two runs on each stage, and
            `breadth_first` one run for each block, as far as that is possible.
        lock_free: Compute does not wait for updates: optimizer states stream through the disk in the background, and each
            unit computes with the newest parameters that there are. `True`, or
            `LockFree(max_staleness=..., warmup_steps=..., predict_weights=...)`. Without a `disk_path` and an
            `offload_optimizer` they are in the Trainer's root folder.
        weights: Pretrained weights to start from, in place of the module's first values: a path, or
            `Weights(path=..., key_mapping=..., allow_missing=..., strict=...)`.
        checkpoints: How checkpoints are written: `Checkpoints(state_dict_type=..., async_save=..., on_failure=...,
            resume=...)`.
        tuning: What changes speed and memory, and is decided well for nearly everybody: `Tuning(staging_memory=...,
            freed_memory=..., matmul_precision=..., reduce_gradients=..., restore_weights=...)`.
        debug: Aids that make a fault show: `Debug(poison=True)`.
    """

    page_size: str | int = "4MiB"
    device_memory: str | int = "auto"
    host_memory: str | int = "auto"
    disk_path: str | Path | Sequence[str | Path] | None = None
    disk_memory: str | int = "auto"
    disk_tbw: str | int = "auto"
    offload_parameters: Home = "auto"
    offload_optimizer: Home = "auto"
    offload_activations: Literal["auto", "none", "host", "disk"] = "auto"
    optimizer_state_dtype: StateDtype | Mapping[str, StateDtype] = "auto"
    frozen_dtype: Literal["compute", "int8", "nf4"] = "compute"
    recompute: str = "auto"
    slices: Slices = 1
    units: Literal["auto"] | Sequence[str] = "auto"
    parallel: Literal["none", "auto"] = "none"
    expert_parallel_size: int = 1
    context_parallel_size: int = 1
    context_parallel: Literal["auto", "gather", "ulysses", "ring"] = "auto"
    tensor_parallel_size: int = 1
    tensor_parallel: TensorParallel = TensorParallel()
    pipeline_parallel_size: int = 1
    micro_batches: int = 1
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved", "breadth_first"] = "1f1b"
    pipeline_blocks: Literal["auto"] | Sequence[int] = "auto"
    lock_free: bool | LockFree = False
    weights: str | Path | Weights | None = None
    checkpoints: Checkpoints = Checkpoints()
    tuning: Tuning = Tuning()
    debug: Debug = Debug()

    def __post_init__(self) -> None:
        self._build_nested()
        page = DEFAULT_PAGE_BYTES if self.page_size == "auto" else self.page_bytes
        if not is_page_size(page):
            raise ConfigError(
                f"page_size={self.page_size!r} is {page} bytes; a page is a multiple of {BLOCK_BYTES} bytes and at least "
                f"64 KiB (disk transfers need it); use e.g. page_size='4MiB'"
            )
        for name in ("device_memory", "host_memory", "disk_memory"):
            _check_memory(self, name)
        if self.rated_disk_bytes is not None and self.rated_disk_bytes < _LEAST_RATED_BYTES:
            raise ConfigError(
                f"disk_tbw={self.disk_tbw!r} is {format_bytes(self.rated_disk_bytes)}, less than any disk's rating; "
                "write its unit, as in '600TB'"
            )
        for name in ("offload_parameters", "offload_optimizer"):
            if getattr(self, name) not in ("auto", "device", "host", "disk"):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is no tier; use 'auto', 'device' (GPU), 'host' (RAM) or 'disk'"
                )
        if self.offload_activations not in ("auto", "none", "host", "disk"):
            hint = ", and recompute='all' to recompute them" if str(self.offload_activations) == "recompute" else ""
            raise ConfigError(
                f"offload_activations={self.offload_activations!r}: use 'auto', 'none', 'host' or 'disk'{hint}"
            )
        _check_words(self)
        self._check_disk()
        self._check_state_dtype()
        self._check_parallel()
        if self.lock_free and self.offload_parameters == "disk":
            raise ConfigError(
                "lock_free=True keeps the parameters that compute uses in RAM, so offload_parameters='disk' cannot "
                "be used with it; leave offload_parameters at 'auto', or use lock_free=False"
            )
        self.recompute_every  # noqa: B018  checked by being read
        self._check_slices()
        named = not isinstance(self.units, str) and self.units and all(isinstance(name, str) for name in self.units)
        if self.units != "auto" and not named:
            raise ConfigError(
                f"units={self.units!r} is neither 'auto' nor a list of class names, so units are unknown; give one, such as "
                f"{_names_of_classes(self.units) or ['Block']}"
            )

    def _build_nested(self) -> None:
        """Turns dictionaries and short forms of nested settings into their objects."""
        built: dict[str, Any] = {
            "tensor_parallel": _build(TensorParallel, "tensor_parallel", self.tensor_parallel),
            "checkpoints": _build(Checkpoints, "checkpoints", self.checkpoints),
            "tuning": _build(Tuning, "tuning", self.tuning),
            "debug": _build(Debug, "debug", self.debug),
        }
        asked: object = self.lock_free
        if isinstance(asked, bool):
            built["lock_free"] = LockFree() if asked else False
        elif isinstance(asked, (LockFree, Mapping)):
            built["lock_free"] = _build(LockFree, "lock_free", asked)
        else:
            raise ConfigError(f"lock_free={asked!r} is neither on nor off; give True, False or LockFree(...)")
        if self.weights is not None:
            given: object = self.weights
            whole = given if isinstance(given, (Weights, Mapping)) else {"path": given}
            built["weights"] = _build(Weights, "weights", whole)
        for name, value in built.items():
            object.__setattr__(self, name, value)  # this object is frozen, and not yet built

    def _check_disk(self) -> None:
        paths = [self.disk_path] if isinstance(self.disk_path, (str, Path)) else self.disk_path
        if paths is not None and not (
            isinstance(paths, Sequence) and paths and all(isinstance(path, (str, Path)) and str(path) for path in paths)
        ):
            raise ConfigError(
                f"disk_path={self.disk_path!r} names no folder; give the path of one, or a list of some "
                "('.' is the current one)"
            )
        try:
            self.disk_paths  # noqa: B018  raises where there is no such home folder
        except RuntimeError as error:
            raise ConfigError(f"disk_path={self.disk_path!r}: {error}; give the whole path") from error
        if self.offload_activations == "disk" and not self.disk_paths:
            raise ConfigError(
                "offload_activations='disk' with disk_path=None: there is no folder that activations could be written to; "
                "give disk_path='/a/folder', or recompute='all'"
            )
        on_disk = self.disk_paths or "disk" in (self.offload_parameters, self.wanted_offload_optimizer)
        for name, purpose in (("disk_memory", "bound"), ("disk_tbw", "rate")):
            value = getattr(self, name)
            if value != "auto" and not on_disk:
                raise ConfigError(
                    f"{name}={value!r} with disk_path=None and nothing offloaded to disk: there is no disk "
                    f"that it could {purpose}; give disk_path='/a/folder' (or offload_optimizer='disk'), or leave {name} out"
                )

    def _check_slices(self) -> None:
        given: object = self.slices
        by_name = isinstance(given, Mapping)
        values: list[Any] = list(given.values()) if isinstance(given, Mapping) else [given]
        of_tokens = [by_name and isinstance(each, (tuple, list)) and [*each][:1] == ["tokens"] for each in values]
        counts = [each[-1] if cut else each for each, cut in zip(values, of_tokens, strict=True)]
        counts = [2 if cut and each == "auto" else each for each, cut in zip(counts, of_tokens, strict=True)]
        named = not isinstance(given, Mapping) or all(isinstance(name, str) for name in given)
        if not counts or not named or not all(type(each) is int and each >= 1 for each in counts):
            raise ConfigError(
                f"slices={given!r}: give a number of slices, 1 (which cuts nothing) or more, or a dictionary from names of "
                f"units to such numbers, as in slices={{'layers.*': 8}}, or from names of modules to numbers of slices of "
                f"their tokens, as in slices={{'*.mlp': ('tokens', 16)}}; 'auto' in place of such a name finds modules that "
                f"compute each token alone, and in place of such a number chooses it, as in {{'auto': ('tokens', 'auto')}}"
            )
        if max(counts) == 1:
            return
        if self.recompute not in ("auto", "none", "all") and self.slices_batches:
            raise ConfigError(
                f"slices={given!r} with recompute={self.recompute!r}: units that are computed in slices are always "
                f"recomputed, and it is unclear what becomes of the others; give recompute='all', or leave recompute out"
            )
        if self.tensor_parallel.sequence_parallel and any(of_tokens):
            raise ConfigError(
                f"slices={given!r} with TensorParallel(sequence_parallel=True): each rank has a part of the tokens "
                f"already, and gathers those of all ranks for a module; leave one of the two out, or name units, as in "
                f"slices={{'layers.*': 8}}"
            )
        if self.tensor_parallel.overlap != "none":
            raise ConfigError(
                f"slices={given!r} with overlap={self.tensor_parallel.overlap!r} of tensor_parallel: the halves of a batch "
                f"are computed in turns already, and each would be cut again while the other one waits; leave one of the two "
                f"out"
            )
        if self.pipeline_parallel_size > 1:
            raise ConfigError(
                f"slices={given!r} with pipeline_parallel_size={self.pipeline_parallel_size}: parts of a batch are computed "
                f"in turns already, each with a fetch of its own; leave one of the two out"
            )

    def _check_state_dtype(self) -> None:
        known, asked = get_args(StateDtype), self.optimizer_state_dtype
        words = list(asked.values()) if isinstance(asked, Mapping) else [asked]
        named = bool(words) and all(isinstance(name, str) for name in self.state_dtypes)
        if not named or not all(word in known for word in words):
            raise ConfigError(
                f"optimizer_state_dtype={asked!r}: use 'auto', 'bf16' or 'int8', or a dictionary from names of "
                f"states to these, such "
                f"as {{'exp_avg': 'bf16', 'exp_avg_sq': 'int8'}}"
            )

    def _check_parallel(self) -> None:
        for name in (
            "expert_parallel_size",
            "context_parallel_size",
            "tensor_parallel_size",
            "pipeline_parallel_size",
        ):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name}={size!r}: give a number of ranks, 1 (which divides nothing) or more")
        if self.context_parallel != "auto" and self.context_parallel_size == 1:
            raise ConfigError(
                f"context_parallel={self.context_parallel!r} with context_parallel_size=1: there is no group of ranks that "
                f"could divide sequences; give a context_parallel_size of 2 or more, or leave context_parallel out"
            )
        if self.context_parallel_size > 1 and self.tensor_parallel.sequence_parallel:
            raise ConfigError(
                f"context_parallel_size={self.context_parallel_size} with TensorParallel(sequence_parallel=True): both "
                f"divide the tokens of a sequence; leave sequence_parallel out, or use context_parallel_size=1"
            )
        for name in ("context_parallel_size", "expert_parallel_size", "pipeline_parallel_size"):
            if self.tensor_parallel.in_halves and getattr(self, name) > 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} with TensorParallel(overlap='two_batches'): one half of a batch "
                    f"computes during all-reduces of the other, and other exchanges between ranks would come in "
                    f"between; use {name}=1, or TensorParallel(overlap='none')"
                )
        if self.tensor_parallel != TensorParallel() and self.tensor_parallel_size == 1:
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel!r} with tensor_parallel_size=1: there is no group of ranks that "
                f"could divide layers or sequences; give a tensor_parallel_size of 2 or more, or leave tensor_parallel out"
            )

        self._check_pipeline()

    def _check_pipeline(self) -> None:
        size, micro, schedule = self.pipeline_parallel_size, self.micro_batches, self.pipeline_schedule
        blocks: Any = self.pipeline_blocks
        if blocks != "auto" and (
            isinstance(blocks, str)
            or not isinstance(blocks, Sequence)
            or not blocks
            or not all(type(each) is int and each >= 1 for each in blocks)
        ):
            raise ConfigError(
                f"pipeline_blocks={blocks!r}: give the number of blocks of each stage, each 1 or more, such as [9, 7], or "
                f"'auto'"
            )
        if isinstance(micro, bool) or not isinstance(micro, int) or micro < 1:
            raise ConfigError(f"micro_batches={micro!r}: give the number of equal parts of each batch, 1 or more")
        if size == 1:
            if micro > 1 or schedule != "1f1b":
                raise ConfigError(
                    f"micro_batches={micro} and pipeline_schedule={schedule!r} with pipeline_parallel_size=1: there are no "
                    f"stages that parts of a batch could go through; give a pipeline_parallel_size of 2 or more, or use "
                    f"Trainer(accumulate_grad_batches=...)"
                )
            if blocks != "auto":
                raise ConfigError(
                    f"pipeline_blocks={blocks!r} with pipeline_parallel_size=1: there are no stages that could have "
                    f"blocks of their own; give a pipeline_parallel_size of 2 or more, or leave pipeline_blocks out"
                )
            return
        several = schedule in SEVERAL_CHUNKS
        if blocks != "auto" and (len(blocks) % size if several else len(blocks) != size):
            raise ConfigError(
                f"pipeline_blocks={blocks!r} has {len(blocks)} numbers for pipeline_parallel_size={size} and "
                f"pipeline_schedule={schedule!r}: give {'a multiple of ' * several}{size} numbers of blocks, or 'auto'"
            )
        if micro == 1:
            raise ConfigError(
                f"pipeline_parallel_size={size} with micro_batches=1: one stage would compute at a time, and {size - 1} "
                f"would wait; give micro_batches={2 * size} or more, which have to divide the batch size"
            )
        if self.expert_parallel_size > 1:
            raise ConfigError(
                f"pipeline_parallel_size={size} with expert_parallel_size={self.expert_parallel_size}: a rank would have the "
                f"blocks of its stage and the experts of its group, and a run divides units in one of these ways; use "
                f"expert_parallel_size=1, with which the ranks of a stage share all experts of its blocks, or "
                f"pipeline_parallel_size=1"
            )
        if self.lock_free:
            raise ConfigError(
                f"pipeline_parallel_size={size} with lock_free: what all stages share (embedding, head) would get wrong "
                f"values from late updates; use one of the two"
            )
        if self.tensor_parallel.sequence_parallel:
            raise ConfigError(
                f"pipeline_parallel_size={size} with TensorParallel(sequence_parallel=True): stages send each other whole "
                f"sequences; use one of the two"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Builds settings from keywords; a name that does not exist is refused with what to give instead."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                hint = unknown_setting(name, known) or _nested_setting(name) or f"the settings are {', '.join(known)}"
                raise ConfigError(f"AngelPTMStrategy has no setting {name!r}; {hint}")
        return cls(**values)

    @property
    def page_bytes(self) -> int:
        if self.page_size == "auto":
            raise InternalError("page_size='auto' was not replaced by a measured size")
        return parse_bytes(self.page_size, name="page_size")

    @property
    def device_bytes(self) -> int | None:
        """None means auto."""
        return _bytes_or_none(self, "device_memory")

    @property
    def host_bytes(self) -> int | None:
        """None means auto."""
        return _bytes_or_none(self, "host_memory")

    @property
    def disk_bytes(self) -> int | None:
        """None means auto."""
        return _bytes_or_none(self, "disk_memory")

    @property
    def rated_disk_bytes(self) -> int | None:
        """Bytes that may be written to each disk; None means auto."""
        return _bytes_or_none(self, "disk_tbw")

    @property
    def lock_free_updates(self) -> LockFree | None:
        """None where updates are synchronous."""
        return self.lock_free if isinstance(self.lock_free, LockFree) else None

    @property
    def pretrained(self) -> Weights | None:
        """None where the module's own first values are taken."""
        return self.weights if isinstance(self.weights, Weights) else None

    @property
    def wanted_offload_optimizer(self) -> Home:
        """`offload_optimizer`, or the disk for lock-free updates that leave it at `auto`."""
        return "disk" if self.lock_free and self.offload_optimizer == "auto" else self.offload_optimizer

    @property
    def state_dtypes(self) -> Mapping[str, StateDtype]:
        """The dtype of each optimizer state, by name; empty if one setting applies to all."""
        return self.optimizer_state_dtype if isinstance(self.optimizer_state_dtype, Mapping) else {}

    @property
    def encodes_states(self) -> bool:
        """Whether pages store any optimizer state in another dtype than the optimizer computes in."""
        return any(word != "auto" for word in (self.state_dtypes.values() or [self.optimizer_state_dtype]))

    @cached_property
    def disk_paths(self) -> tuple[Path, ...]:
        if self.disk_path is None:
            return ()
        paths = (self.disk_path,) if isinstance(self.disk_path, (str, Path)) else self.disk_path
        return tuple(Path(path).expanduser() for path in paths)  # no shell does it for what is in a config file

    @property
    def slices_batches(self) -> bool:
        """Whether some units are computed on slices of the batch."""
        counts = self.slices.values() if isinstance(self.slices, Mapping) else [self.slices]
        return any(isinstance(each, int) and each > 1 for each in counts)

    @property
    def recompute_every(self) -> int:
        """0: no unit is recomputed, or the run chooses them; k: every k-th is, counted from the first (1: all)."""
        if self.recompute in ("none", "auto"):
            return 0
        if self.recompute == "all":
            return 1
        match = re.fullmatch(r"every\s+(\d+)(?:st|nd|rd|th)?", str(self.recompute))
        if match is None or int(match.group(1)) < 1:
            raise ConfigError(
                f"recompute={self.recompute!r} is no known choice; use 'auto', 'none', 'all', or 'every 2nd', 'every 3rd' "
                "and so on"
            )
        return int(match.group(1))


def _names_of_classes(units: Any) -> list[str]:
    """Returns the names of the classes in a value of `units`."""
    return [each.__name__ for each in units if isinstance(each, type)] if isinstance(units, list | tuple) else []


def _nested_setting(name: str) -> str:
    """Returns a hint for a field of nested settings that was given by itself; empty if there is no such field."""
    for setting, cls in NESTED.items():
        if name in (each.name for each in dataclasses.fields(cls)):
            return f"give {setting}={cls.__name__}({name}=...)"
    return ""


def listing_settings(cls: _Class) -> _Class:
    """Class decorator: `**settings` of the constructor become the settings, by name, with default and description, in what
    `help`, completion and LightningCLI read. The line `settings: ...` of the docstring's Args is where they go."""
    init = vars(cls)["__init__"]
    types = get_type_hints(Settings)
    own = inspect.signature(init)
    init.__signature__ = own.replace(
        parameters=[
            *(each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD),
            *(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
                )
                for field in dataclasses.fields(Settings)
            ),
        ]
    )
    if cls.__doc__ and Settings.__doc__:  # not under python -OO
        described = Settings.__doc__.partition("Args:\n")[2].rstrip()
        cls.__doc__ = re.sub(r"^ *settings: .*$", lambda _: described, cls.__doc__, flags=re.MULTILINE)
    return cls


def home_tier(home: Home | Literal["none"]) -> Tier | None:
    """The tier that a setting names; None for `auto` and `none`."""
    return {tier.name.lower(): tier for tier in TIERS}.get(home)

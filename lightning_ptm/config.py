"""The user's settings: parsed and checked once, before anything is built.

Knows the standard library only. I1: a `Settings` object that exists is valid. I2: what is `auto` here is decided by the
engine from the machine; nothing else reads the machine.

Long because each setting says here what it does, and what is refused of it what to do instead.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from lightning_ptm.errors import ConfigError, InternalError
from lightning_ptm.setting_hints import unknown_setting
from lightning_ptm.terms import BLOCK_BYTES, TIERS, Tier, is_page_size

DEFAULT_PAGE_BYTES = 4 << 20

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

Home = Literal["auto", "device", "host", "disk"]
StateDtype = Literal["auto", "bf16", "int8"]


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


def format_bytes(count: int | float) -> str:
    """`4194304` -> `4 MiB`, `1610612736` -> `1.5 GiB`; for messages and tables."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a user can set on `AngelPTMStrategy`, with its default.

    Args:
        page_size: Bytes of a page, the smallest amount that is allocated and moved: a multiple of 4096, at least 64 KiB.
            `auto` takes the smallest with which disk and device are about as fast as they can be, by a measurement of about
            a second at the start, on rank 0 for all; 4 MiB where there is neither. The numbers do not depend on it.
        device_memory: Bytes of the compute device that pages may take (per rank). On a CPU-only machine, giving a number
            makes a device tier apart from the host tier, so that all three tiers run; `auto` makes RAM the only one.
        host_memory: Bytes of RAM that pages may take (per rank). `auto` takes what the machine (or its memory cgroup)
            has free, less a reserve; where that is less than 4 GiB a rank, a quarter of it, or as much more as pages need.
        disk_path: Folder, or several, for the disk tier. Several are striped. The files never outlive the process. The
            last folder is made where it is missing; the one around it must exist.
        disk_memory: Bytes of the disk tier (per rank). `auto` takes what the plan needs.
        offload_parameters: Tier that holds the compute parameters between steps; `auto` lets the plan decide.
        frozen_dtype: In how many bits pages keep frozen matrices (`requires_grad=False`), but for those of the root unit and
            of embeddings: as they `compute`, or as codes of 8 (`int8`) or 4 bits (`nf4`, that of QLoRA), with a scale for
            each 64 elements. They come to compute precision when their unit is fetched. What the codes do not hold is lost:
            checkpoints, and the module after the run, have the rounded values.
        offload_optimizer: Tier that holds fp32 parameters and optimizer moments between steps; `auto` lets the plan decide.
        optimizer_state_dtype: What optimizer states lie in pages as: `auto`, as the optimizer computes them; `bf16`,
        2 bytes an
            element; `int8`, 1 byte and a scale for each 64; or a dictionary from their names to these, such as
            `{"exp_avg": "bf16", "exp_avg_sq": "int8"}`. For any element-wise optimizer, which goes on computing in fp32;
            rounding is stochastic, so that small changes count. fp32 parameters stay: AdamW's 12 bytes a parameter become 8,
            or 6. Checkpoints hold fp32, and are those of any other run.
        recompute: Activations of which units are recomputed in the backward pass: `none`, `all`, or `every 2nd`,
            `every 3rd` and so on.
        activations: Where activations that are not recomputed wait for the backward pass: `keep` leaves them on the device,
            `host` takes those of units to page-locked RAM and back, on streams of their own. The numbers are the same.
            With `recompute`, what goes there is what units are recomputed from. Needs a device with memory of its own.
        units: Class names of the modules that are fetched and released together; `auto` takes the elements of
            `ModuleList` and `Sequential`, that is, a transformer's blocks.
        reduce_gradients: With several ranks and accumulation: `each_backward` reduces (and so shards) gradients after every
            micro-batch; `each_step` lets them add up, whole, on each rank first, and reduces once: less traffic for
            2 bytes a parameter of memory beside the pages. The sums differ by their rounding.
        expert_parallel_size: Groups of so many ranks divide the experts of layers such as `models.moe.MixtureOfExperts`:
            each rank holds its part of them, tokens travel to the ranks that hold their experts and back, and an expert's
            pages are sharded over the ranks that hold it, one of each group. All else is as without; 1 divides nothing.
        tensor_parallel_size: Groups of so many ranks compute the same batches, each with its parts of the linear layers that
            `tensor_parallel_plan` names, and exchange activations. What a group has whole is sharded over its ranks, too, so
            each element of the model has one owner. 1 cuts nothing. Checkpoints are those of a run without.
        tensor_parallel_plan: How the model is cut: a dictionary from names of modules (with `*` for numbers) to rules of
            `lightning_ptm.parallel` (`ColwiseParallel`, `RowwiseParallel`, `VocabParallel`, `Partial`, `Summed`), or
            Transformers' words for them.
            `auto` takes what the model's classes say of themselves: this package's models do, and Transformers'.
        sequence_parallel: With `tensor_parallel_size`: between the layers that are cut (norms, dropout, residuals), each rank
            of a group computes its part of the sequence, and keeps the activations of that alone. Blocks take and give what
            is whole. Each rank draws random numbers of its own for its part.
        lock_free: Compute does not wait for updates: master states stream through the disk in the background, and each
            unit computes with the newest parameters that there are. Without a `disk_path` and a `offload_optimizer`
            they are in the
            Trainer's root folder.
        max_staleness: With `lock_free`: steps whose gradients a parameter in use may not include yet; compute waits rather
            than exceed it. 0 gives the numbers of a synchronous run.
        staleness_warmup: With `lock_free`: the first so many optimizer steps of a training wait for their updates, with the
            numbers of a synchronous run; `max_staleness` holds from then on. A run that goes on from a checkpoint counts the
            steps before it. In the first steps, when loss falls fastest, staleness costs most.
        forecast: With `lock_free` and a `max_staleness` above 0: parameters in use are changed as the updates that they do
            not include yet are expected to change them (Adam, AdamW and SGD). Only what compute uses: each gradient is
            applied once, to the exact parameters. A staleness of a step or two then costs next to nothing in loss; where
            more updates are lacking, parameters are used as they are. Each step of a forecast takes compute a pass over
            the parameters.
        matmul_precision: On a CPU, how products of 16-bit tensors are computed (matrix products, attention, convolutions):
            `native` by torch's own kernels, `fp32` in fp32 and rounded once, or `auto`: natively unless the processor has no
            16-bit arithmetic, where that takes 10 to 100 times as long. Pages and all other operators stay 16-bit; units
            are then computed without torch.compile.
        staging_memory: Bytes of RAM for pages in flight between disk and update; `auto` picks a few dozen pages.
        freed_memory: On a CPU, what becomes of the memory of activations when a step has freed it: `keep` it for the next
            step (faster), `return` it to the system (smaller), or `auto`: return it where something is on disk and
            pages take a quarter of the free RAM or more, else keep it; with all in RAM, keep large blocks (32 MiB and more)
            only in a mixed precision, whose gradients take half as much as without pages.
        state_dict_type: `full` checkpoints are one ordinary Lightning file, with all states gathered on rank 0 as it is
            written; `sharded` ones are a folder of safetensors files, written by all ranks straight from their pages.
        async_save: Training goes on while a sharded checkpoint is written: what an update is about to change is copied
            first. Copies take at most an eighth of the free RAM; updates wait when it is used up.
        failed_save: What becomes of the run when a checkpoint cannot be written: `stop` it with the error, or `go_on` with
            a warning. Earlier checkpoints are kept either way.
        resume: `auto`: a fit that is not given a checkpoint goes on from the newest complete one, full or sharded, in the
            folders of the Trainer's checkpoint callbacks, and begins anew where there is none; so a run that was killed is
            started again as it was started. `never`: only from one that it is given.
        weights: Pretrained weights to start from, in place of the module's first values: a safetensors file, a folder with
            `model.safetensors` or with shards and `model.safetensors.index.json`, or a sharded checkpoint. They go from
            the files straight into pages, at the start of the first run with a module; a checkpoint that is given to that
            run is loaded over them.
        weights_map: Which name in the files is which in the module: a dictionary of prefixes ("prefix in the files": "prefix
            in the module"; the longest counts, null leaves names out, "" is the prefix of all), or a function (name -> name,
            or None). By default one prefix that suits the names is found and put before all of them.
        weights_new: Names of the module, with wildcards, that the files need not have (adapters, a new head).
        weights_strict: Files that lack a name of the module, or have others, are refused; if not, what is missing is
            initialised as usual, and a warning lists it.
        restore_weights: After a run, put full weights back into the module's parameters if RAM holds them; else those that
            were trained, and if it does not hold these, write them to disk.
        poison: Fill released pages with NaN, and compare all of a weight's copy, not a sample, with what it was when it was
            brought (a debugging aid: a read of released memory shows, and so does a write that would be lost).
    """

    page_size: str | int = "4MiB"
    device_memory: str | int = "auto"
    host_memory: str | int = "auto"
    disk_path: str | Path | Sequence[str | Path] | None = None
    disk_memory: str | int = "auto"
    offload_parameters: Home = "auto"
    frozen_dtype: Literal["compute", "int8", "nf4"] = "compute"
    offload_optimizer: Home = "auto"
    optimizer_state_dtype: StateDtype | Mapping[str, StateDtype] = "auto"
    recompute: str = "none"
    activations: Literal["keep", "host"] = "keep"
    units: Literal["auto"] | Sequence[str] = "auto"
    reduce_gradients: Literal["each_backward", "each_step"] = "each_backward"
    expert_parallel_size: int = 1
    tensor_parallel_size: int = 1
    tensor_parallel_plan: Literal["auto"] | Mapping[str, Any] = "auto"
    sequence_parallel: bool = False
    lock_free: bool = False
    max_staleness: int = 1
    staleness_warmup: int = 0
    forecast: bool = True
    matmul_precision: Literal["auto", "native", "fp32"] = "auto"
    staging_memory: str | int = "auto"
    freed_memory: Literal["auto", "keep", "return"] = "auto"
    state_dict_type: Literal["full", "sharded"] = "full"
    async_save: bool = False
    failed_save: Literal["stop", "go_on"] = "stop"
    resume: Literal["never", "auto"] = "never"
    weights: str | Path | None = None
    weights_map: Mapping[str, str | None] | Callable[[str], str | None] | None = None
    weights_new: Sequence[str] = ()
    weights_strict: bool = True
    restore_weights: bool = True
    poison: bool = False

    def __post_init__(self) -> None:
        page = DEFAULT_PAGE_BYTES if self.page_size == "auto" else self.page_bytes
        if not is_page_size(page):
            raise ConfigError(
                f"page_size={self.page_size!r} is {page} bytes; a page is a multiple of {BLOCK_BYTES} bytes and at least "
                f"64 KiB (disk transfers need it); use e.g. page_size='4MiB'"
            )
        for name in ("device_memory", "host_memory", "disk_memory", "staging_memory"):
            self._bytes_or_none(name)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):  # the text "false" would count as true
                raise ConfigError(f"{field.name}={value!r} is neither on nor off; give True or False")
        for name in ("offload_parameters", "offload_optimizer"):
            if getattr(self, name) not in ("auto", "device", "host", "disk"):
                raise ConfigError(f"{name}={getattr(self, name)!r} is no tier; use 'auto', 'device', 'host' or 'disk'")
        self._check_disk_path()
        self._check_state_dtype()
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                listed = ", ".join(map(repr, words[:-1]))
                raise ConfigError(f"{name}={getattr(self, name)!r}: use {listed} or {words[-1]!r}")
        if self.async_save and self.state_dict_type != "sharded":
            raise ConfigError(
                "async_save=True writes checkpoints from pages, and state_dict_type='full' gathers them first; set "
                "state_dict_type='sharded', or async_save=False"
            )
        self._check_parallel()
        self._check_lock_free()
        self._check_weights()
        self.recompute_every  # noqa: B018  checked by being read
        if self.activations not in ("keep", "host"):
            hint = ", and recompute='all' to recompute them" if str(self.activations) == "recompute" else ""
            raise ConfigError(f"activations={self.activations!r}: use 'keep' or 'host'{hint}")
        named = not isinstance(self.units, str) and self.units and all(isinstance(name, str) for name in self.units)
        if self.units != "auto" and not named:
            raise ConfigError(f"units={self.units!r}: give 'auto' or a list of class names such as ['Block']")
        self._check_without_effect()

    def _check_without_effect(self) -> None:
        """Raises ConfigError for a setting that would change nothing beside the others: whoever gives it expects a change."""
        for needs in _NEEDS:
            if needs.met(self):
                continue
            for name in needs.names:
                value, default = getattr(self, name), getattr(type(self), name)
                if value != default and (value or default):  # an empty list is an empty tuple
                    raise ConfigError(
                        f"{name}={value!r} with {needs.otherwise}; give {needs.give}, or leave {name} out"
                    )

    def _check_lock_free(self) -> None:
        for name in ("max_staleness", "staleness_warmup"):
            steps = getattr(self, name)
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
                raise ConfigError(f"{name}={steps!r}: give a number of steps, 0 or more")
        if self.lock_free and self.offload_parameters == "disk":
            raise ConfigError(
                "lock_free=True computes with parameters that lie in RAM, and offload_parameters is 'disk'; "
                "leave it at 'auto', "
                "or use lock_free=False"
            )

    def _check_disk_path(self) -> None:
        paths = [self.disk_path] if isinstance(self.disk_path, (str, Path)) else self.disk_path
        if paths is not None and not (
            isinstance(paths, Sequence) and paths and all(isinstance(path, (str, Path)) and str(path) for path in paths)
        ):
            raise ConfigError(
                f"disk_path={self.disk_path!r}: give the path of a folder, or a list of some ('.' is the current one)"
            )
        try:
            self.disk_paths  # noqa: B018  raises where there is no such home folder
        except RuntimeError as error:
            raise ConfigError(f"disk_path={self.disk_path!r}: {error}; give the whole path") from error

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
        for name in ("expert_parallel_size", "tensor_parallel_size"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name}={size!r}: give a number of ranks, 1 (which divides nothing) or more")
        if self.tensor_parallel_plan != "auto" and not isinstance(self.tensor_parallel_plan, Mapping):
            raise ConfigError(
                f"tensor_parallel_plan={self.tensor_parallel_plan!r}: give 'auto', or a dictionary such as "
                f"{{'blocks.*.expand': ColwiseParallel(), 'blocks.*.project': RowwiseParallel()}} (from "
                f"lightning_ptm.parallel)"
            )

    def _check_weights(self) -> None:
        if self.weights is not None and not isinstance(self.weights, (str, Path)):
            raise ConfigError(f"weights={self.weights!r}: give the path of a safetensors file or of a folder with some")
        pairs = self.weights_map.items() if isinstance(self.weights_map, Mapping) else ()
        of_prefixes = all(isinstance(key, str) and (value is None or isinstance(value, str)) for key, value in pairs)
        if not of_prefixes or not (
            self.weights_map is None or isinstance(self.weights_map, Mapping) or callable(self.weights_map)
        ):
            raise ConfigError(
                f"weights_map={self.weights_map!r}: give a dictionary such as {{'transformer': 'model.transformer'}}, where "
                f"None leaves names out, or a function from a name in the files to a name in the module"
            )
        if isinstance(self.weights_new, str) or not all(isinstance(name, str) for name in self.weights_new):
            raise ConfigError(f"weights_new={self.weights_new!r}: give a list of names such as ['*.lora_*']")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Builds settings from keywords; a name that does not exist is refused with what to give instead."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                hint = unknown_setting(name, known) or f"the settings are {', '.join(known)}"
                raise ConfigError(f"AngelPTMStrategy has no setting {name!r}; {hint}")
        return cls(**values)

    def _bytes_or_none(self, name: str) -> int | None:
        value = getattr(self, name)
        return None if value == "auto" else parse_bytes(value, name=name)

    @property
    def page_bytes(self) -> int:
        if self.page_size == "auto":
            raise InternalError("page_size is 'auto', and nobody has put the measured number in its place")
        return parse_bytes(self.page_size, name="page_size")

    @property
    def device_bytes(self) -> int | None:
        """None means auto."""
        return self._bytes_or_none("device_memory")

    @property
    def host_bytes(self) -> int | None:
        """None means auto."""
        return self._bytes_or_none("host_memory")

    @property
    def disk_bytes(self) -> int | None:
        """None means auto."""
        return self._bytes_or_none("disk_memory")

    @property
    def staging_bytes(self) -> int | None:
        """None means auto."""
        return self._bytes_or_none("staging_memory")

    @property
    def wanted_offload_optimizer(self) -> Home:
        """Lock-free updates are for master states on disk, if nobody says otherwise."""
        return "disk" if self.lock_free and self.offload_optimizer == "auto" else self.offload_optimizer

    @property
    def state_dtypes(self) -> Mapping[str, StateDtype]:
        """By name of a state; empty where it is one for all."""
        return self.optimizer_state_dtype if isinstance(self.optimizer_state_dtype, Mapping) else {}

    @property
    def encodes_states(self) -> bool:
        """Whether some states are to lie in pages as something else than the optimizer computes."""
        return any(word != "auto" for word in (self.state_dtypes.values() or [self.optimizer_state_dtype]))

    @property
    def disk_paths(self) -> tuple[Path, ...]:
        if self.disk_path is None:
            return ()
        paths = (self.disk_path,) if isinstance(self.disk_path, (str, Path)) else self.disk_path
        return tuple(Path(path).expanduser() for path in paths)  # no shell does it for what is in a config file

    @property
    def recompute_every(self) -> int:
        """0: no unit is recomputed; k: every k-th is, counted from the first (1: all)."""
        if self.recompute == "none":
            return 0
        if self.recompute == "all":
            return 1
        match = re.fullmatch(r"every\s+(\d+)(?:st|nd|rd|th)?", str(self.recompute))
        if match is None or int(match.group(1)) < 1:
            raise ConfigError(f"recompute={self.recompute!r}: use 'none', 'all', or 'every 2nd', 'every 3rd', ...")
        return int(match.group(1))


@dataclasses.dataclass(frozen=True, slots=True)
class _Needs:
    """Settings that have an effect only where others of the same object do not switch it off.

    Attributes:
        names: of the settings.
        met: whether they have an effect.
        otherwise: what switches it off, and why nothing happens then. give: the remedy.
    """

    names: tuple[str, ...]
    met: Callable[[Settings], bool]
    otherwise: str
    give: str


_NEEDS = (
    _Needs(
        ("max_staleness", "staleness_warmup", "forecast"),
        lambda settings: settings.lock_free,
        "lock_free=False: each step waits for its update anyway, so no parameter is late and nothing is forecast",
        "lock_free=True",
    ),
    _Needs(
        ("sequence_parallel", "tensor_parallel_plan"),
        lambda settings: settings.tensor_parallel_size > 1,
        "tensor_parallel_size=1: there is no group of ranks that could divide layers or sequences",
        "a tensor_parallel_size of 2 or more",
    ),
    _Needs(
        ("weights_map", "weights_new", "weights_strict"),
        lambda settings: settings.weights is not None,
        "weights=None: no files are read that it could be about",
        "weights='/a/folder' with safetensors files",
    ),
    _Needs(
        ("disk_memory",),
        lambda settings: (
            bool(settings.disk_paths) or "disk" in (settings.offload_parameters, settings.wanted_offload_optimizer)
        ),
        "disk_path=None and no home on disk: there is no disk tier that it could bound",
        "disk_path='/a/folder' (or offload_optimizer='disk')",
    ),
)
"""Kept to what this object alone can tell: what has an effect on one machine and none on another is no mistake."""

_WORDS = {
    name: get_args(get_type_hints(Settings)[name])
    for name in (
        "state_dict_type",
        "failed_save",
        "reduce_gradients",
        "matmul_precision",
        "freed_memory",
        "resume",
        "frozen_dtype",
    )
}
"""What these settings may be."""

_Class = TypeVar("_Class", bound=type)


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


def home_tier(home: Home) -> Tier | None:
    """The tier that a home setting names; None for `auto`."""
    return {tier.name.lower(): tier for tier in TIERS}.get(home)

"""Hardware files: what a node offers and how fast it is, read from YAML and checked (configs/hardware/*.yaml).

Owns the names and meaning of the fields. Two views of it: `Machine`, by which a run decides (runtime/machine.py), and
`Hardware`, by which a plan is timed (planning/timing.py).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from lightning_ptm.commands.estimate import Work
from lightning_ptm.config import Settings, parse_bytes
from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.backend import KINDS
from lightning_ptm.planning.timing import Hardware
from lightning_ptm.runtime.machine import Machine

FOLDERS = (Path(__file__).parents[1] / "configs" / "hardware", Path(__file__).parents[2] / "configs" / "hardware")
"""Where configs/hardware/ is: inside the installed package, or beside it in a checkout."""

DTYPES = ("bfloat16", "float16", "float32", "float64")
_LEAST_RATE = 1e6
"""Of bytes or operations per second. Nothing that computes is slower; what is below was written in GB/s or TFLOP/s."""
_LEAST_RAM_BYTES = 1 << 20
"""Likewise, for a size that was written without its unit."""
_NEVER = 1e-9
"""Bytes per second of a link that is not there; nothing crosses it in a plan for that machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One node, as its file describes it: sizes in bytes, rates per second.

    Attributes:
        source: the file; name: how it is called.
        device: `cuda`, or `cpu`: device memory is then RAM.
        device_memory: of one device; 0 on a CPU. host_memory, disk_memory, cpu_cores: of the node.
        compute_flops_per_s: of one rank, by dtype.
        compute_efficiency: the share of these rates, and of those of attention, functions and memory where they are given,
            that a model's forward and backward reach.
        device_memory_bytes_per_s: of one device. host_memory_bytes_per_s: of the node; reads and writes count alike.
        host_to_device_bytes_per_s, device_to_host_bytes_per_s: of one device; None on a CPU.
        disk_read_bytes_per_s, disk_write_bytes_per_s: of the node; None without a disk.
        intra_node_bytes_per_s: of one rank's part in a collective; None with one rank.
        inter_node_bytes_per_s: of a node; None where there is no other.
        attention_flops_per_s: of one rank, by dtype; curved_numel_per_s: elements of exponential functions (GELU, softmax),
            likewise. A forward and a backward count as three forwards in all three. None where compute_efficiency makes up
            for what is no matrix multiplication.
        update_bytes_per_s: of one rank's optimizer arithmetic; None: that of the memory where it runs.
        disk_update_bytes_per_s: of the same on a CPU that computes, while the disk is read and written; None: the same.
        beside_update_bytes_per_s: of the same in a thread of its own, while all cores of a CPU compute; None: half of it.
        chunk_s: what a CPU does for each chunk of updates that stream through the disk, a page of fp32 elements, beside
            arithmetic and transfers; None: nothing.
        beside_loss: seconds by which compute gets longer for each second of that, with all that goes with it; None: 1, for
            cores that compute in lockstep wait for the slowest of them.
        learn_numel_per_s, forecast_numel_per_s: elements that such an update learns a forecast of, beside its own
            arithmetic, and elements that a forecast is added to; None: that takes no time.
        disk_both_bytes_per_s: of reads and writes that go on together, of the node; None: they do not slow each other.
        disk_bytes_per_core_s: that one core can read and write a second, the disk being as fast as it likes; None: any.
        unit_s, step_s: of one rank, what each forward or backward of a unit, and each step, takes beside all this.
        cpu_threads: with which one rank reaches its rates on a CPU; None: all cores that it has.
        page_size: bytes of the smallest page that saturates the links; None where nobody has measured it.
    """

    source: Path
    name: str
    device: str
    ranks_per_node: int
    device_memory: int
    host_memory: int
    disk_memory: int
    cpu_cores: int
    compute_flops_per_s: dict[str, float]
    compute_efficiency: float
    device_memory_bytes_per_s: float | None
    host_memory_bytes_per_s: float
    host_to_device_bytes_per_s: float | None
    device_to_host_bytes_per_s: float | None
    disk_read_bytes_per_s: float | None
    disk_write_bytes_per_s: float | None
    intra_node_bytes_per_s: float | None
    inter_node_bytes_per_s: float | None
    attention_flops_per_s: dict[str, float] | None = None
    curved_numel_per_s: dict[str, float] | None = None
    update_bytes_per_s: float | None = None
    disk_update_bytes_per_s: float | None = None
    chunk_s: float | None = None
    beside_update_bytes_per_s: float | None = None
    beside_loss: float | None = None
    learn_numel_per_s: float | None = None
    forecast_numel_per_s: float | None = None
    disk_both_bytes_per_s: float | None = None
    disk_bytes_per_core_s: float | None = None
    unit_s: float | None = None
    step_s: float | None = None
    cpu_threads: int | None = None
    page_size: int | None = None

    @property
    def apart(self) -> bool:
        """Its devices have memory of their own."""
        return KINDS[self.device].apart

    @property
    def cores_per_rank(self) -> float:
        """CPU cores of one rank."""
        return self.cpu_cores / self.ranks_per_node

    @property
    def threads(self) -> float:
        """Cores that one rank's compute, or its update, keeps busy on a CPU."""
        return min(self.cpu_threads or math.inf, self.cores_per_rank)

    def machine(self) -> Machine:
        """What a run would find on it, if nothing else ran there."""
        return Machine(
            device_apart=self.apart,
            free_device_bytes=self.device_memory,
            free_host_bytes=self.host_memory,
            free_disk_bytes=self.disk_memory,
            cores=self.cpu_cores,
            ranks=self.ranks_per_node,
        )

    def rates(self, nodes: int, expert_ranks: int = 1) -> Hardware:
        """One rank's share. A ring over all ranks is as fast as its slowest part, the network between nodes being shared
        by nobody else.

        Args:
            expert_ranks: how many ranks divide experts among them. They send tokens to each other at the same time, those
                of a node sharing its network; and ranks that hold the same experts make rings of their own, which share it,
                too.

        Raises:
            ConfigError: several ranks or nodes, and no rate of what connects them.
        """
        ranks = self.ranks_per_node
        between = [
            self._needed("intra_node_bytes_per_s", f"there are {ranks} ranks on a node") if ranks > 1 else math.inf,
            self._needed("inter_node_bytes_per_s", f"there are {nodes} nodes") if nodes > 1 else math.inf,
        ]
        ram = self.host_memory_bytes_per_s / ranks
        return Hardware(
            name=self.name,
            host_to_device_bytes_per_s=self.host_to_device_bytes_per_s or ram,
            device_to_host_bytes_per_s=self.device_to_host_bytes_per_s or ram,
            disk_read_bytes_per_s=(self.disk_read_bytes_per_s or _NEVER) / ranks,
            disk_write_bytes_per_s=(self.disk_write_bytes_per_s or _NEVER) / ranks,
            collective_bytes_per_s=min(between),
            update_host_bytes_per_s=ram if self.update_bytes_per_s is None else self.update_bytes_per_s,
            update_device_bytes_per_s=self.device_memory_bytes_per_s or self.update_bytes_per_s or ram,
            disk_both_bytes_per_s=None if self.disk_both_bytes_per_s is None else self.disk_both_bytes_per_s / ranks,
            shared_cores=not self.apart,
            exchange_bytes_per_s=self._exchange_bytes_per_s(nodes, expert_ranks) if expert_ranks > 1 else None,
            holders_bytes_per_s=self._holders_bytes_per_s(nodes, expert_ranks) if expert_ranks > 1 else None,
            disk_update_bytes_per_s=self.disk_update_bytes_per_s,
            chunk_s=self.chunk_s or 0.0,
            disk_bytes_per_core_s=self.disk_bytes_per_core_s,
        )

    def _exchange_bytes_per_s(self, nodes: int, size: int) -> float:
        """What one rank sends to others a second, as much to each of its group; counted by the group that is slowest.

        Links inside a node and the network work at the same time.
        """
        ranks = self.ranks_per_node
        slowest_s = 0.0  # of a byte to each other member
        network: Counter[int] = Counter()  # such bytes that leave a node
        for start in range(0, nodes * ranks, size):
            on_node = Counter(rank // ranks for rank in range(start, start + size))
            for node, members in on_node.items():
                if members > 1:
                    rate = self._needed("intra_node_bytes_per_s", f"there are {ranks} ranks on a node")
                    slowest_s = max(slowest_s, (members - 1) / rate)
                network[node] += members * (size - members)
        if most := max(network.values()):
            slowest_s = max(slowest_s, most / self._needed("inter_node_bytes_per_s", f"there are {nodes} nodes"))
        return (size - 1) / slowest_s

    def _holders_bytes_per_s(self, nodes: int, size: int) -> float:
        """Of a ring over ranks that hold the same experts, every `size`-th of all."""
        ranks = self.ranks_per_node
        holders = nodes * ranks // size
        rates = [math.inf]
        if holders > 1 and size < ranks:
            rates.append(self._needed("intra_node_bytes_per_s", f"there are {ranks} ranks on a node"))
        if holders > 1 and nodes > 1:
            rates.append(self._needed("inter_node_bytes_per_s", f"there are {nodes} nodes") / min(size, ranks))
        return min(rates)

    def seconds(self, work: Work, dtype: str) -> float:
        """What the forward of a unit takes one rank, if nothing keeps it waiting.

        Raises:
            ConfigError: the file has no rate for the dtype.
        """
        flops_per_s = self.flops_per_s(dtype)
        if self.attention_flops_per_s is None or self.curved_numel_per_s is None:
            return work.flops / flops_per_s
        memory = self.device_memory_bytes_per_s or self.host_memory_bytes_per_s / self.ranks_per_node
        matrix, attention = self.compute_flops_per_s[dtype], self.attention_flops_per_s[dtype]
        return forward_s(work, matrix, attention, self.curved_numel_per_s[dtype], memory) / self.compute_efficiency

    def flops_per_s(self, dtype: str) -> float:
        """What one rank computes a second, in training.

        Raises:
            ConfigError: the file has no rate for the dtype.
        """
        if dtype not in self.compute_flops_per_s:
            raise ConfigError(
                f"{self.source}: compute_flops_per_s has no {dtype}, which this config computes in; it has "
                f"{', '.join(self.compute_flops_per_s)}; set another trainer.precision in a copy of the config (16-mixed, "
                f"say), or add the rate to the hardware file"
            )
        return self.compute_flops_per_s[dtype] * self.compute_efficiency

    def _needed(self, field: str, reason: str) -> float:
        value: float | None = getattr(self, field)
        if value is None:
            raise ConfigError(f"{self.source}: {field} is missing, and {reason}; add it, or plan for fewer")
        return value


def forward_s(
    work: Work, matrix_flops_per_s: float, attention_flops_per_s: float, curved_per_s: float, memory_bytes_per_s: float
) -> float:
    """Seconds of a unit's forward by the rates of what it is made of; a third of its forward and backward."""
    return (
        (work.flops - work.attention_flops) / matrix_flops_per_s
        + work.attention_flops / attention_flops_per_s
        + work.curved_numel / curved_per_s
        + work.moved_bytes / memory_bytes_per_s
    )


_SIZES = ("device_memory", "host_memory", "disk_memory")
_COUNTS = ("ranks_per_node", "cpu_cores")
_MAY_BE_ZERO = ("device_memory", "disk_memory")
_RATES = tuple(
    field.name
    for field in dataclasses.fields(Node)
    if "_bytes_per_" in field.name or field.name in ("learn_numel_per_s", "forecast_numel_per_s", "beside_loss")
)
_SECONDS = ("unit_s", "step_s", "chunk_s")
_BY_DTYPE = ("attention_flops_per_s", "curved_numel_per_s")
_MAY_BE_NULL = {
    "device_memory_bytes_per_s": "on a CPU",
    "host_to_device_bytes_per_s": "on a CPU",
    "device_to_host_bytes_per_s": "on a CPU",
    "disk_read_bytes_per_s": "without a disk",
    "disk_write_bytes_per_s": "without a disk",
    "intra_node_bytes_per_s": "for one rank",
    "inter_node_bytes_per_s": "for one node",
    "update_bytes_per_s": "where it is the memory's",
    "disk_update_bytes_per_s": "where the disk does not slow it",
    "beside_update_bytes_per_s": "where it is not known",
    "beside_loss": "where it is not known",
    "chunk_s": "where it is not known",
    "learn_numel_per_s": "where it is not known",
    "forecast_numel_per_s": "where it is not known",
    "disk_both_bytes_per_s": "where reads and writes do not slow each other",
    "disk_bytes_per_core_s": "where it takes no core's time",
    "unit_s": "where it is not known",
    "step_s": "where it is not known",
}
FIELDS = tuple(field.name for field in dataclasses.fields(Node) if field.name not in ("source", "name"))
_MAY_BE_ABSENT = tuple(field.name for field in dataclasses.fields(Node) if field.default is None)
"""What `lightning-ptm probe` measures and data sheets do not tell."""


def installed() -> list[str]:
    """Names of the files in configs/hardware/."""
    return sorted({path.stem for folder in FOLDERS for path in folder.glob("*.yaml")})


def find(name: str) -> Path:
    """The hardware file that `name` means: a path, or the name of one in configs/hardware/.

    Raises:
        ConfigError: there is none.
    """
    if Path(name).is_file():
        return Path(name)
    if Path(name).name == name:
        for folder in FOLDERS:
            for candidate in (folder / name, folder / f"{name}.yaml"):
                if candidate.is_file():
                    return candidate
    raise ConfigError(
        f"there is no hardware file {name!r}, neither here nor among the installed ones ({', '.join(installed())}); name "
        f"one of these, give a path, or write one with `lightning-ptm probe > mine.yaml`"
    )


def read(path: Path) -> Node:
    """A hardware file, checked.

    Raises:
        ConfigError: names the file, the field, and what it should be.
    """
    try:
        return parsed(path.read_text(), path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a hardware file ({error}); give a YAML file") from error


def parsed(text: str, path: Path) -> Node:
    """What a hardware file says, checked; `path` is how errors name it.

    Raises:
        ConfigError: as `read`; YAMLError: it is no YAML.
    """
    document = yaml.safe_load(text)
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path} is no hardware file: it should have fields such as {FIELDS[0]}: cuda")
    for name in document:
        if name not in FIELDS:
            near = difflib.get_close_matches(str(name), FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(FIELDS)}"
            raise ConfigError(f"{path}: there is no field {name!r}; {hint}")
    missing = [name for name in FIELDS if name not in document and name not in _MAY_BE_ABSENT]
    if missing:
        are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise ConfigError(
            f"{path}: {', '.join(missing)} {are} missing, so nothing can be planned for this machine; add {them} (null where "
            f"there is no such link; the installed {find('a100_40gb_x8')} has all fields)"
        )
    return _Reader(path, document).node()


class _Reader:
    """One call of `read`, all fields being there."""

    def __init__(self, path: Path, document: Mapping[str, Any]) -> None:
        self._path = path
        self._document = document

    def node(self) -> Node:
        values: dict[str, Any] = {}
        device = self._document["device"]
        compute = self._by_dtype("compute_flops_per_s")
        if device not in KINDS:
            raise self._wrong("device", "cuda or cpu")
        for name in _SIZES:
            values[name] = self._size(name)
        for name in _COUNTS:
            values[name] = self._count(name)
        for name in _RATES:
            values[name] = self._rate(name, self._document.get(name))
        for name in _SECONDS:
            values[name] = self._rate(name, self._document.get(name))
        for name in _BY_DTYPE:
            values[name] = self._by_dtype(name) if self._document.get(name) is not None else None
            if values[name] is not None and set(values[name]) != set(self._document["compute_flops_per_s"]):
                raise self._wrong(name, "a rate for each dtype of compute_flops_per_s")
        values["cpu_threads"] = self._count("cpu_threads") if self._document.get("cpu_threads") is not None else None
        values["page_size"] = self._page_size()
        if KINDS[device].apart:
            for name in ("device_memory", "device_memory_bytes_per_s", "host_to_device_bytes_per_s"):
                if not values[name]:
                    raise self._wrong(name, "more than 0 where device is cuda")
            if not values["device_to_host_bytes_per_s"]:
                raise self._wrong("device_to_host_bytes_per_s", "more than 0 where device is cuda")
        elif values["device_memory"]:
            raise self._wrong("device_memory", "0 where device is cpu: RAM is host_memory")
        if values["disk_memory"]:
            for name in ("disk_read_bytes_per_s", "disk_write_bytes_per_s"):
                if values[name] is None:
                    raise self._wrong(name, "more than 0, for disk_memory is")
        efficiency = self._rate("compute_efficiency", self._document["compute_efficiency"])
        if efficiency is None or efficiency > 1:
            raise self._wrong("compute_efficiency", "more than 0 and at most 1")
        return Node(
            source=self._path,
            name=self._path.stem,
            device=device,
            compute_flops_per_s=compute,
            compute_efficiency=efficiency,
            **values,
        )

    def _size(self, name: str) -> int:
        given = self._document[name]
        try:
            size = parse_bytes(given, name=name)
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error
        if not size and name not in _MAY_BE_ZERO:
            raise self._wrong(name, "more than 0")
        if 0 < size < _LEAST_RAM_BYTES:
            raise ConfigError(
                f"{self._path}: {name} is {given!r}, which is {size} bytes and holds nothing; write its unit, as in {size}GiB"
            )
        return size

    def _count(self, name: str) -> int:
        given = self._document[name]
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise self._wrong(name, "a whole number from 1 up")
        return given

    def _rate(self, name: str, given: object) -> float | None:
        if given is None and name in _MAY_BE_NULL:
            return None
        # 32e9 is a text to YAML 1.1, which wants 32.0e+9.
        try:
            rate = math.nan if isinstance(given, bool) else float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            rate = math.nan
        if not (0 < rate < math.inf):
            null = f" (or null {_MAY_BE_NULL[name]})" if name in _MAY_BE_NULL else ""
            raise self._wrong(name, f"a number above 0{null}", given)
        if rate < _LEAST_RATE and ("_bytes_per_" in name or "_flops_per_s" in name):
            unit, prefix, factor = ("operations", "T", "e12") if "flops" in name else ("bytes", "G", "e9")
            raise self._wrong(
                name,
                f"in {unit} per second, and no machine is as slow as {rate:g} of them; write {rate:g}{factor} if you mean "
                f"{rate:g} {prefix}{'FLOP' if prefix == 'T' else 'B'}/s",
                given,
            )
        return rate

    def _page_size(self) -> int | None:
        given = self._document.get("page_size")
        if given is None:
            return None
        if given == "auto":
            raise self._wrong("page_size", "a number of bytes (or null where nobody has measured it)")
        try:
            return Settings(page_size=given).page_bytes
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error

    def _by_dtype(self, name: str) -> dict[str, float]:
        given = self._document[name]
        if not isinstance(given, Mapping) or not given:
            raise self._wrong(name, f"a rate for each dtype, of {', '.join(DTYPES)}")
        rates = {}
        for dtype, rate in given.items():
            if dtype not in DTYPES:
                raise ConfigError(
                    f"{self._path}: {name} has an unknown dtype {dtype!r}; it may have {', '.join(DTYPES)}"
                )
            rates[dtype] = self._rate(f"{name}.{dtype}", rate) or 0.0
        return rates

    def _wrong(self, name: str, wanted: str, given: object = dataclasses.MISSING) -> ConfigError:
        shown = self._document.get(name) if given is dataclasses.MISSING else given
        return ConfigError(f"{self._path}: {name} is {'null' if shown is None else repr(shown)}; it has to be {wanted}")

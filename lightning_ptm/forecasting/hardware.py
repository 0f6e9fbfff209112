"""Hardware files: sizes and rates of a node, read from YAML and checked (configs/hardware/*.yaml).

Owns the valid values of fields; node.py documents their meaning.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from lightning_ptm.config import Settings, parse_bytes
from lightning_ptm.errors import ConfigError
from lightning_ptm.forecasting.node import Node
from lightning_ptm.memory.backend import device_has_own_memory
from lightning_ptm.update.state_encoding import ENCODINGS

FOLDERS = (Path(__file__).parents[1] / "configs" / "hardware", Path(__file__).parents[2] / "configs" / "hardware")
"""Possible locations of configs/hardware/: in the installed package, and next to the package in a checkout."""

DTYPES = ("bfloat16", "float16", "float32", "float64")
_LEAST_RATE = 1e6
"""Least rate in bytes or operations per second. No machine is slower: a lower value was written in GB/s or TFLOP/s."""
_LEAST_RAM_BYTES = 1 << 20
"""Least size: a lower value was written without its unit."""


_SIZES = ("device_memory", "host_memory", "disk_memory")
_COUNTS = ("ranks_per_node", "cpu_cores")
_MAY_BE_ZERO = ("device_memory", "disk_memory")
_RATES = tuple(
    field.name
    for field in dataclasses.fields(Node)
    if "_bytes_per_" in field.name or field.name in ("learn_numel_per_s", "prediction_numel_per_s", "beside_loss")
)
_SECONDS = ("unit_s", "step_s", "chunk_s", "collective_s", "tensor_exchange_s", "round_s")
_BY_DTYPE = ("attention_flops_per_s", "curved_numel_per_s", "update_flops_per_s")
_MAY_BE_NULL = {
    "device_memory_bytes_per_s": "on a CPU",
    "host_to_device_bytes_per_s": "on a CPU",
    "device_to_host_bytes_per_s": "on a CPU",
    "disk_read_bytes_per_s": "without a disk",
    "disk_write_bytes_per_s": "without a disk",
    "intra_node_bytes_per_s": "for one rank",
    "inter_node_bytes_per_s": "for one node",
    "tensor_exchange_bytes_per_s": "where it is that of other collectives",
    "update_bytes_per_s": "where it is the memory's",
    "disk_update_bytes_per_s": "where the disk does not slow it",
    "beside_update_bytes_per_s": "where it is not known",
    "beside_loss": "where it is not known",
    "chunk_s": "where it is not known",
    "learn_numel_per_s": "where it is not known",
    "prediction_numel_per_s": "where it is not known",
    "disk_both_bytes_per_s": "where reads and writes do not slow each other",
    "disk_bytes_per_core_s": "where it takes no core's time",
    "collective_bytes_per_core_s": "where they take no time of the cores that compute",
    "collective_s": "where it is not known",
    "tensor_exchange_s": "where it is not known",
    "round_s": "where it is not known",
    "unit_s": "where it is not known",
    "step_s": "where it is not known",
}
WITH_DEVICES = "with_devices"
"""The key of the fields that depend on how many devices a node has: by their number, what else the node has."""
FIELDS = tuple(field.name for field in dataclasses.fields(Node) if field.name not in ("source", "name"))
_MAY_BE_ABSENT = tuple(field.name for field in dataclasses.fields(Node) if field.default is None)
"""Fields that not every machine has (a disk, links between devices), or that `lightning-ptm probe` measures and data
sheets do not contain."""


def installed() -> list[str]:
    """Returns the names of the files in configs/hardware/."""
    return sorted({path.stem for folder in FOLDERS for path in folder.glob("*.yaml")})


def find(name: str) -> Path:
    """Returns the path of a hardware file.

    Args:
        name: a path, or the name of a file in configs/hardware/.

    Raises:
        ConfigError: there is no such file.
    """
    if Path(name).is_file():
        return Path(name)
    if (found := _installed_file(name)) is not None:
        return found
    near = _similar(name)
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ConfigError(
        f"there is no hardware file {name!r}, neither in {Path.cwd()} nor among the installed ones; {meant}name one of these "
        f"({', '.join(installed())}), give a path, or write one with `lightning-ptm probe > mine.yaml`"
    )


def _similar(name: str) -> list[str]:
    """Installed names that begin or end with the letters and digits of a name, or the most similar one."""
    plain = {known: re.sub(r"[^a-z0-9]", "", known) for known in installed()}
    without_suffix = re.sub(r"[^a-z0-9]\d+ ?gb$|[^a-z0-9]?(?:ti|super|sxm\d?|pcie|nvl)$", "", name.lower())
    for part in (re.sub(r"[^a-z0-9]|nvidia|geforce|amd|instinct", "", each) for each in (name.lower(), without_suffix)):
        found = [
            known for known, letters in plain.items() if part and (letters.startswith(part) or letters.endswith(part))
        ]
        if found:
            return found
    return difflib.get_close_matches(name.lower(), installed(), n=1)


def _installed_file(name: str) -> Path | None:
    candidates = (folder / each for folder in FOLDERS for each in (name, f"{name}.yaml"))
    return next((path for path in candidates if path.is_file()), None) if Path(name).name == name else None


def look_up(name: str, devices: int | None = None) -> Node:
    """Returns the node that a hardware file describes.

    Args:
        name: as for `find`; a name may end with the number of devices: `h100_x8`.
        devices: the number of devices of the node; None: the file's, or the least that it has.

    Raises:
        ConfigError: there is no such file, or it is wrong (see `read`).
    """
    base, _, count = name.rpartition("_x")
    if devices is None and base and count.isdigit() and not Path(name).is_file() and _installed_file(name) is None:
        name, devices = base, int(count)
    if devices is not None and not Path(name).is_file() and _installed_file(f"{name}_x{devices}") is not None:
        name = f"{name}_x{devices}"
    return read(find(name), devices)


def read(path: Path, devices: int | None = None) -> Node:
    """Reads and checks a hardware file.

    Args:
        devices: as for `look_up`.

    Raises:
        ConfigError: a field is missing, unknown or wrong; the text names the file, the field and its valid values.
    """
    try:
        return parsed(path.read_text(), path, devices)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a hardware file ({error}); give a YAML file") from error


def parsed(text: str, path: Path, devices: int | None = None) -> Node:
    """Parses and checks the text of a hardware file; errors name it by `path`.

    Raises:
        ConfigError: as in `read`.
        YAMLError: the text is not YAML.
    """
    document = yaml.safe_load(text)
    if not isinstance(document, Mapping):
        raise ConfigError(f"{path} is no hardware file: it should have fields such as {FIELDS[0]}: cuda")
    counted = devices is not None or WITH_DEVICES in document
    document = _with_devices(dict(document), path, devices)
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
    suffix = f"_x{document['ranks_per_node']}"
    several = counted and document["ranks_per_node"] != 1 and not path.stem.endswith(suffix)
    return _Reader(path, document, f"{path.stem}{suffix}" if several else path.stem).node()


def _with_devices(document: dict[str, Any], path: Path, devices: int | None) -> dict[str, Any]:
    """A document of the node with so many devices: where the file has no node with that number, it has the RAM, cores and
    disk of the next smaller one."""
    nodes = document.pop(WITH_DEVICES, None)
    if nodes is None:
        return document if devices is None else document | {"ranks_per_node": devices}
    if (
        not isinstance(nodes, Mapping)
        or not nodes
        or not all(isinstance(count, int) and isinstance(fields, Mapping) for count, fields in nodes.items())
    ):
        raise ConfigError(
            f"{path}: {WITH_DEVICES} has to have fields by number of devices, as in 1: {{host_memory: 64GiB}}"
        )
    least = min(nodes)
    count = max((count for count in nodes if count <= (devices or least)), default=least)
    return document | {"ranks_per_node": devices or least} | nodes[count]


_DISK_FORM = "a size, a rate or both, such as '2TB', '3GB/s' or '2TB, 3GB/s' (or 'none')"


def with_ram_and_disk(node: Node, ram: str | int | None, disk: str | None) -> Node:
    """Returns the node with other RAM, and with another disk.

    Args:
        ram: bytes; None: as it is.
        disk: a size, a rate for reads and for writes, or both; None: as it is.

    Raises:
        ConfigError: they are no such thing.
    """
    if ram is not None:
        size = parse_bytes(ram, name="ram")
        if size < _LEAST_RAM_BYTES:
            raise ConfigError(f"ram is {ram!r}, which is {size} bytes, too few for any page; write its unit: '64GiB'")
        node = dataclasses.replace(node, host_memory=size)
    if disk is None:
        return node
    if disk == "none":
        return dataclasses.replace(node, disk_memory=0)
    for given in disk.split(","):
        try:
            size = parse_bytes(given.strip().removesuffix("/s"), name="disk")
        except ConfigError as error:
            raise ConfigError(f"disk is {disk!r}; give {_DISK_FORM}") from error
        if size < _LEAST_RAM_BYTES:
            raise ConfigError(f"disk is {disk!r}, and {given.strip()} is too little for any page; give {_DISK_FORM}")
        if given.strip().endswith("/s"):
            node = dataclasses.replace(
                node, disk_read_bytes_per_s=float(size), disk_write_bytes_per_s=float(size), disk_both_bytes_per_s=None
            )
        else:
            node = dataclasses.replace(node, disk_memory=size)
    if not node.disk_memory or node.disk_read_bytes_per_s is None:
        raise ConfigError(
            f"{node.name} has no disk, so disk={disk!r} says too little; give its size and rate: '2TB, 3GB/s'"
        )
    return node


class _Reader:
    """Converts and checks the fields of a document that has all required fields."""

    def __init__(self, path: Path, document: Mapping[str, Any], name: str) -> None:
        self._path = path
        self._name = name
        self._document = document

    def node(self) -> Node:
        values: dict[str, Any] = {}
        device = self._document["device"]
        compute = self._by_dtype("compute_flops_per_s")
        try:
            has_own_memory = device_has_own_memory(str(device))
        except ConfigError as error:
            raise self._wrong("device", "cpu, cuda, xpu or another device type of torch") from error
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
        values["states_numel_per_s"] = None
        if self._document.get("states_numel_per_s") is not None:
            values["states_numel_per_s"] = self._by_dtype("states_numel_per_s", ENCODINGS)
        values["cpu_threads"] = self._count("cpu_threads") if self._document.get("cpu_threads") is not None else None
        values["page_size"] = self._page_size()
        if has_own_memory:
            for name in ("device_memory", "device_memory_bytes_per_s", "host_to_device_bytes_per_s"):
                if not values[name]:
                    raise self._wrong(name, f"more than 0 where device is {device}")
            if not values["device_to_host_bytes_per_s"]:
                raise self._wrong("device_to_host_bytes_per_s", f"more than 0 where device is {device}")
        elif values["device_memory"]:
            raise self._wrong("device_memory", "0 where device is cpu: RAM is host_memory")
        if values["disk_memory"]:
            for name in ("disk_read_bytes_per_s", "disk_write_bytes_per_s"):
                if values[name] is None:
                    raise self._wrong(name, "more than 0, as disk_memory is")
        efficiency = self._rate("compute_efficiency", self._document["compute_efficiency"])
        if efficiency is None or efficiency > 1:
            raise self._wrong("compute_efficiency", "more than 0 and at most 1")
        return Node(
            source=self._path,
            name=self._name,
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
                f"{self._path}: {name} is {given!r}, which is {size} bytes, too few for any page; write its unit, as in "
                f"{size}GiB"
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
        # YAML 1.1 reads 32e9 as text; a number would be 32.0e+9.
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
            raise self._wrong("page_size", "a number of bytes (or null where it was not measured)")
        try:
            return Settings(page_size=given).page_bytes
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error

    def _by_dtype(self, name: str, dtypes: Collection[str] = DTYPES) -> dict[str, float]:
        given = self._document[name]
        if not isinstance(given, Mapping) or not given:
            raise self._wrong(name, f"a rate for each dtype, of {', '.join(dtypes)}")
        rates = {}
        for dtype, rate in given.items():
            if dtype not in dtypes:
                raise ConfigError(
                    f"{self._path}: {name} has an unknown dtype {dtype!r}; it may have {', '.join(dtypes)}"
                )
            rates[dtype] = self._rate(f"{name}.{dtype}", rate) or 0.0
        return rates

    def _wrong(self, name: str, wanted: str, given: object = dataclasses.MISSING) -> ConfigError:
        shown = self._document.get(name) if given is dataclasses.MISSING else given
        return ConfigError(f"{self._path}: {name} is {'null' if shown is None else repr(shown)}; it has to be {wanted}")

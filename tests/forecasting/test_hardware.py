"""Hardware files: the ones that come along, and what a wrong one says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_ptm.errors import ConfigError
from lightning_ptm.forecasting.counting import UnitWork
from lightning_ptm.forecasting.hardware import FIELDS, find, installed, look_up, read, with_ram_and_disk
from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.rates import Hardware
from lightning_ptm.planning.expert_split import divided
from lightning_ptm.planning.mesh import Axis, Mesh

FOLDER = Path(__file__).parents[2] / "configs" / "hardware"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_file_that_comes_along_is_read_and_says_where_its_numbers_come_from(path: Path) -> None:
    node = read(find(path.stem))
    assert node.source.samefile(path)
    assert node.rates(1).host_to_device_bytes_per_s == node.host_to_device_bytes_per_s
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() in FIELDS and name not in ("device", "ranks_per_node"):
            assert "# " in rest, f"{name} does not say where it comes from"


def test_ranks_share_what_a_node_has() -> None:
    node = read(find("a100_40gb_x8"))
    one, many = node.rates(1), node.rates(32)
    assert node.machine().ranks == 8
    assert one.disk_read_bytes_per_s == 3.5e9 / 8
    assert one.update_host_bytes_per_s == 375e9 / 8
    assert one.host_to_device_bytes_per_s == 32e9  # each device has its own
    assert many.collective_bytes_per_s == 200e9
    assert node.flops_per_s("bfloat16") == 312e12 * 0.5


def test_the_slowest_part_of_a_ring_counts(tmp_path: Path) -> None:
    node = read(changed(tmp_path, inter_node_bytes_per_s=25e9))
    assert node.rates(1).collective_bytes_per_s == 200e9
    assert node.rates(2).collective_bytes_per_s == 25e9


def rates(node: Node, nodes: int, experts: int, parts: int = 1) -> Hardware:
    """Where groups of so many divide experts, and so many cut layers."""
    mesh = Mesh.of(nodes * node.ranks_per_node, {Axis.EXPERT: experts, Axis.TENSOR: parts})
    return node.rates(nodes, divided(mesh, {1: 0}, 1))


def test_tokens_take_the_links_between_the_ranks_that_exchange_them(tmp_path: Path) -> None:
    node = read(changed(tmp_path, intra_node_bytes_per_s=100e9, inter_node_bytes_per_s=25e9))
    assert rates(node, 4, 1).exchange_bytes_per_s is None
    assert rates(node, 4, 2).exchange_bytes_per_s == pytest.approx(100e9)  # inside of nodes
    assert rates(node, 4, 8).exchange_bytes_per_s == pytest.approx(100e9)
    # Of what a rank sends to 15 others, 8 parts leave the node, as those of its 7 neighbours do.
    assert rates(node, 4, 16).exchange_bytes_per_s == pytest.approx(15 / (8 * 8 / 25e9))
    # Layers in two parts: a rank sends to 7 others, 4 of them elsewhere, as all 8 ranks of a node do.
    assert rates(node, 4, 8, 2).exchange_bytes_per_s == pytest.approx(7 / (8 * 4 / 25e9))
    fast = read(changed(tmp_path, intra_node_bytes_per_s=1e9, inter_node_bytes_per_s=25e9))
    assert rates(fast, 4, 16).exchange_bytes_per_s == pytest.approx(15 / (7 / 1e9))
    # A group of three ranks lies across two nodes: of twelve such bytes between them, eight leave the middle one.
    twelve = read(changed(tmp_path, ranks_per_node=4, intra_node_bytes_per_s=100e9, inter_node_bytes_per_s=1e9))
    assert rates(twelve, 3, 3).exchange_bytes_per_s == pytest.approx(2 / (4 / 1e9))


def test_activations_are_added_up_in_rings_of_neighbours(tmp_path: Path) -> None:
    node = read(changed(tmp_path, intra_node_bytes_per_s=100e9, inter_node_bytes_per_s=25e9))
    assert rates(node, 4, 1).tensor_exchange_bytes_per_s is None
    assert rates(node, 4, 1, 8).tensor_exchange_bytes_per_s == 100e9
    assert rates(node, 4, 2, 4).tensor_exchange_bytes_per_s == 100e9
    assert rates(node, 4, 1, 16).tensor_exchange_bytes_per_s == 25e9  # one ring leaves a node
    known = dataclasses.replace(node, tensor_exchange_bytes_per_s=7e9)
    assert rates(known, 4, 1, 8).tensor_exchange_bytes_per_s == 7e9
    assert rates(known, 4, 1, 8).collective_bytes_per_s == 25e9


def test_ranks_that_share_experts_or_parts_share_the_network_with_those_that_share_others(tmp_path: Path) -> None:
    node = read(changed(tmp_path, intra_node_bytes_per_s=100e9, inter_node_bytes_per_s=200e9))
    experts, parts, data = (Axis.DATA, Axis.TENSOR), (Axis.DATA, Axis.EXPERT), (Axis.DATA,)

    def of(nodes: int, *split: int) -> dict[tuple[Axis, ...], float]:
        return dict(rates(node, nodes, *split).shared_bytes_per_s)

    assert of(4, 8)[data] == 200e9 / 8  # eight rings, each with a rank of each node
    assert of(4, 4)[data] == 200e9 / 4
    assert of(4, 2)[data] == 100e9  # two rings, which go through the nodes
    assert of(4, 16)[data] == 200e9 / 8
    assert of(1, 2)[data] == 100e9
    # With layers in two parts, neighbours hold the same experts; those that share these parts are every eighth.
    assert of(4, 4, 2)[experts] == 200e9 / 4
    assert of(4, 4, 2)[parts] == 100e9
    assert of(4, 4, 2)[data] == 200e9 / 8
    assert data not in of(1, 4, 2)  # experts and parts take all ranks


def changed(folder: Path, **values: Any) -> Path:
    """A file that comes along, with other values; `None` by the name of `drop` leaves a field out."""
    document = yaml.safe_load((FOLDER / "a100_40gb_x8.yaml").read_text())
    document |= values
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in document.items() if value != "left out"}))
    return path


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"host_memory": "left out"},
            r"mine\.yaml: host_memory is missing, so nothing .* add it \(null .*a100_40gb_x8\.yaml",
        ),
        (
            {"host_memory": "left out", "device": "left out"},
            r"mine\.yaml: device, host_memory are missing, .* add them",
        ),
        (
            {"host_memory": 128},
            r"host_memory is 128, which is 128 bytes, too few for any page; write its unit, as in 128GiB",
        ),
        (
            {"host_to_device_bytes_per_s": 32},
            r"is 32; it has to be in bytes .* as slow as 32 .* 32e9 if you mean 32 GB/s",
        ),
        (
            {"compute_flops_per_s": {"bfloat16": 312}},
            r"bfloat16 is 312; .* operations .* 312e12 if you mean 312 TFLOP/s",
        ),
        ({"host_memory": 0}, r"mine\.yaml: host_memory is 0; .* more than 0"),
        ({"host_memory": -5}, r"mine\.yaml: host_memory=-5 is not a size"),
        ({"host_memory": "much"}, r"mine\.yaml: host_memory='much' is not a size"),
        ({"host_memori": 5}, r"no field 'host_memori'; did you mean host_memory\?"),
        ({"zebra": 5}, r"no field 'zebra'; the fields are device, "),
        ({"device": "tpu"}, r"device is 'tpu'; it has to be cpu, cuda, xpu or another device type of torch"),
        ({"device": "cpu"}, r"device_memory is '40GB'; it has to be 0 where device is cpu"),
        ({"ranks_per_node": 0}, r"ranks_per_node is 0; .* from 1 up"),
        ({"ranks_per_node": True}, r"ranks_per_node is True"),
        ({"disk_read_bytes_per_s": -1}, r"disk_read_bytes_per_s is -1; .* above 0 \(or null without a disk\)"),
        ({"disk_read_bytes_per_s": None}, r"disk_read_bytes_per_s is null; .* disk_memory is"),
        ({"host_memory_bytes_per_s": None}, r"host_memory_bytes_per_s is null; it has to be a number above 0$"),
        ({"host_memory_bytes_per_s": "nan"}, r"host_memory_bytes_per_s is 'nan'"),
        ({"host_to_device_bytes_per_s": None}, r"host_to_device_bytes_per_s is null; .* device is cuda"),
        ({"compute_flops_per_s": {}}, r"compute_flops_per_s is \{\}; .* a rate for each dtype"),
        ({"compute_flops_per_s": {"bf16": 1}}, r"unknown dtype 'bf16'; it may have bfloat16"),
        ({"compute_flops_per_s": {"bfloat16": 0}}, r"compute_flops_per_s\.bfloat16 is 0"),
        ({"compute_efficiency": 1.5}, r"compute_efficiency is 1\.5; .* at most 1"),
        ({"page_size": "auto"}, r"page_size is 'auto'; it has to be a number of bytes"),
        ({"page_size": 5000}, r"mine\.yaml: page_size=5000 is 5000 bytes; a page is a multiple of 4096"),
        (
            {"attention_flops_per_s": {"bfloat16": 1e12}},
            r"attention_flops_per_s is .* each dtype of compute_flops_per_s",
        ),
        ({"curved_numel_per_s": 5}, r"curved_numel_per_s is 5; .* a rate for each dtype"),
        ({"unit_s": 0}, r"unit_s is 0; .* above 0 \(or null where it is not known\)"),
        ({"disk_both_bytes_per_s": -1}, r"disk_both_bytes_per_s is -1"),
        ({"beside_loss": 0}, r"beside_loss is 0; .* above 0 \(or null where it is not known\)"),
        ({"chunk_s": "long"}, r"chunk_s is 'long'; .* a number above 0"),
        ({"round_s": 0}, r"round_s is 0; .* above 0 \(or null where it is not known\)"),
        ({"tensor_exchange_s": -1}, r"tensor_exchange_s is -1"),
        ({"collective_s": "soon"}, r"collective_s is 'soon'"),
        ({"learn_numel_per_s": -1}, r"learn_numel_per_s is -1"),
        ({"states_numel_per_s": 1e8}, r"states_numel_per_s is .*; .* a rate for each dtype, of bf16, int8"),
        (
            {"states_numel_per_s": {"nf4": 1e8}},
            r"states_numel_per_s has an unknown dtype 'nf4'; it may have bf16, int8",
        ),
        ({"states_numel_per_s": {"int8": 0}}, r"states_numel_per_s\.int8 is 0"),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(changed(tmp_path, **values))


def test_what_is_no_hardware_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text, words in (("- 1", "is no hardware file"), ("a: [", "cannot be read")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read(path)
    with pytest.raises(ConfigError, match=r"'dgx'.*a100_40gb, a100_40gb_x8, .*, rtx4090, .*probe"):
        find("dgx")
    with pytest.raises(ConfigError, match=r"'rtx409', neither in /.*; did you mean 'rtx4090'\?"):
        look_up("rtx409", 1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("RTX 4090", "'rtx4090'"),
        ("4090", "'rtx4090'"),
        ("NVIDIA GeForce RTX 4090 Ti", "'rtx4090'"),
        ("h100-80gb", "'h100'"),
        ("a100", "'a100_40gb' or 'a100_40gb_x8' or 'a100_80gb'"),
        ("h100_sxm5", "'h100'"),
    ],
)
def test_a_name_that_people_use_leads_to_the_file(name: str, meant: str) -> None:
    """'4090' was answered as the name '', and 'a100' with 'h100'."""
    with pytest.raises(ConfigError, match=rf"there is no hardware file {name!r}, .*; did you mean {meant}\?"):
        look_up(name)


def test_machines_that_people_have_or_rent_come_along() -> None:
    alone = ["rtx3090", "rtx4090", "rtx5090", "gh200", "laptop"]
    rented = ["l4", "l40s", "a10g", "a100_40gb", "a100_80gb", "h100", "h200", "b200", "mi300x"]
    assert sorted([*alone, *rented, "a100_40gb_x8", "v100_32gb_x8"]) == installed()
    for name in alone + rented:
        node = look_up(name)
        assert (node.name, node.ranks_per_node) == (name, 1) and node.disk_memory and node.disk_read_bytes_per_s
        assert node.rates(1).collective_bytes_per_s == float("inf")
    for name in rented:
        node, one = look_up(name, 8), look_up(name, 1)
        assert (node.name, node.ranks_per_node) == (f"{name}_x8", 8) and node == look_up(f"{name}_x8")
        assert node.device_memory == one.device_memory and node.compute_flops_per_s == one.compute_flops_per_s
        assert node.host_memory > one.host_memory and node.rates(1).collective_bytes_per_s < float("inf")


def test_a_number_of_devices_that_a_file_does_not_have_shares_the_ram_of_fewer(tmp_path: Path) -> None:
    two, one = look_up("rtx4090", 2), look_up("rtx4090")
    assert (two.name, two.ranks_per_node) == ("rtx4090_x2", 2) and two.host_memory == one.host_memory
    assert look_up("h100", 4).host_memory == look_up("h100").host_memory
    mine = changed(tmp_path)  # a file for one number
    assert look_up(str(mine)).ranks_per_node == 8
    assert (look_up(str(mine), 2).ranks_per_node, look_up(str(mine), 2).name) == (2, "mine_x2")
    with pytest.raises(ConfigError, match="intra_node_bytes_per_s is missing, and there are 2 ranks on a node"):
        look_up("laptop", 2).rates(1)
    for wrong in ([], {}, {"one": {}}, {1: 5}):
        with pytest.raises(ConfigError, match="with_devices has to have fields by number of devices, as in 1: "):
            read(changed(tmp_path, with_devices=wrong))


def test_ram_and_disk_are_changed() -> None:
    node = look_up("rtx4090")
    changed_node = with_ram_and_disk(node, "128GiB", "2TB, 3GB/s")
    assert (changed_node.host_memory, changed_node.disk_memory) == (128 << 30, 2 * 10**12)
    assert (changed_node.disk_read_bytes_per_s, changed_node.disk_write_bytes_per_s) == (3e9, 3e9)
    assert with_ram_and_disk(node, None, None) is node
    assert with_ram_and_disk(node, None, "1.5GB/s").disk_memory == node.disk_memory
    assert with_ram_and_disk(node, None, "none").machine().free_disk_bytes == 0
    for ram, disk, words in (
        ("64", None, "ram is '64', which is 64 bytes, too few"),
        ("much", None, "ram='much' is not a size"),
        (None, "quick", "disk is 'quick'; give a size, a rate or both, such as '2TB'"),
        (None, "3", "disk is '3', and 3 is too little for any page"),
    ):
        with pytest.raises(ConfigError, match=words):
            with_ram_and_disk(node, ram, disk)
    with pytest.raises(ConfigError, match=r"v100_32gb_x8 has no disk, so disk='2TB' says too little"):
        with_ram_and_disk(look_up("v100_32gb_x8"), None, "2TB")


def test_several_nodes_need_a_network_and_a_dtype_needs_a_rate() -> None:
    node = read(find("v100_32gb_x8"))
    with pytest.raises(ConfigError, match=r"inter_node_bytes_per_s is missing, and there are 2 nodes"):
        node.rates(2)
    with pytest.raises(ConfigError, match=r"has no bfloat16.*float16, float32, float64.*precision"):
        node.flops_per_s("bfloat16")


def test_what_a_probe_measures_beside_multiplications_counts() -> None:
    node = read(find("a100_40gb_x8"))
    work = UnitWork(flops=10**12, attention_flops=10**11, curved_numel=10**9, moved_bytes=10**9)
    assert node.seconds(work, "bfloat16") == pytest.approx(1e12 / 156e12)
    same = dict.fromkeys(node.compute_flops_per_s, 1e12), dict.fromkeys(node.compute_flops_per_s, 1e10)
    node = dataclasses.replace(node, attention_flops_per_s=same[0], curved_numel_per_s=same[1])
    assert node.seconds(work, "bfloat16") == pytest.approx((9e11 / 312e12 + 0.1 + 0.1 + 1e9 / 1.555e12) / 0.5)

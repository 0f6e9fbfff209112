"""Products of 16-bit tensors in fp32, rounded once: which operators, with which bits, and when."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptm import ConfigError
from lightning_ptm.comm import SoloCommunicator
from lightning_ptm.config import Settings
from lightning_ptm.memory.accelerators import AcceleratorBackend
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.trainer.matmul_precision import (
    HALVES,
    SLOW,
    chosen_wide_matmuls,
    has_arithmetic,
    slowdown,
    wide_matmuls,
)

CPU = CpuBackend()
half = pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape))).to(dtype)


A, B, C = numbers(5, 7, seed=1), numbers(7, 6, seed=2), numbers(5, 6, seed=3)
BATCH_A, BATCH_B, BATCH_C = numbers(3, 5, 7), numbers(3, 7, 6, seed=4), numbers(3, 5, 6, seed=5)
IMAGE, KERNEL, BIAS = numbers(2, 4, 9, 9), numbers(8, 2, 3, 3, seed=6), numbers(8, seed=7)

FORWARD: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "mm": (torch.mm, (A, B)),
    "mm, transposed": (lambda a, b: torch.mm(a.t(), b), (A, C)),
    "mm, by columns": (lambda a, b: torch.mm(a, b.t()), (C, numbers(4, 6))),
    "bmm": (torch.bmm, (BATCH_A, BATCH_B)),
    "mv": (torch.mv, (A, numbers(7))),
    "dot": (torch.dot, (numbers(300), numbers(300, seed=9))),
    "vdot": (torch.vdot, (numbers(300), numbers(300, seed=9))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), (C, A, B)),
    "addmv": (lambda c, a, b: torch.addmv(c, a, b, alpha=0.3), (numbers(5), A, numbers(7))),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.2), (BATCH_C, BATCH_A, BATCH_B)),
    "addbmm": (torch.addbmm, (C, BATCH_A, BATCH_B)),
    "conv2d": (lambda x, w, b: functional.conv2d(x, w, b, stride=2, padding=1, groups=2), (IMAGE, KERNEL, BIAS)),
    "conv1d": (functional.conv1d, (numbers(2, 4, 9), numbers(8, 4, 3, seed=8), BIAS)),
    "conv3d": (functional.conv3d, (numbers(1, 2, 5, 5, 5), numbers(8, 2, 2, 2, 2, seed=8), BIAS)),
    "conv_transpose2d": (functional.conv_transpose2d, (IMAGE, numbers(4, 3, 2, 2, seed=8))),
    "conv_tbc": (torch.conv_tbc, (numbers(6, 2, 4), numbers(3, 4, 8), BIAS)),
}


@half
@pytest.mark.parametrize("name", FORWARD)
def test_a_product_is_that_of_fp32_rounded_once(name, dtype) -> None:
    compute, inputs = FORWARD[name]
    halves = [each.to(dtype) for each in inputs]
    with wide_matmuls():
        ours = compute(*halves)
    assert ours.dtype is dtype
    assert torch.equal(ours, compute(*[each.float() for each in halves]).to(dtype))


@half
@pytest.mark.parametrize("name", FORWARD)
def test_so_are_its_gradients(name, dtype) -> None:
    compute, inputs = FORWARD[name]

    def gradients(wide: bool, back: Tensor | None = None) -> list[Tensor]:
        leaves = [each.to(dtype).to(torch.float32 if not wide else dtype).requires_grad_() for each in inputs]
        result = compute(*leaves)
        upstream = numbers(*result.shape, seed=11).to(dtype)
        return list(torch.autograd.grad(result, leaves, upstream.to(result.dtype)))

    with wide_matmuls():
        ours = gradients(True)
    theirs = [each.to(dtype) for each in gradients(False)]
    # Where autograd computes a gradient in several operators, each rounds: equal up to that.
    exact = name not in ("addmm", "addmv", "baddbmm", "addbmm", "conv_tbc", "conv1d")
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype is dtype
        assert torch.equal(mine, reference) if exact else torch.allclose(mine, reference, rtol=0.02, atol=0.05)


@half
@pytest.mark.parametrize("masked", ["no mask", "causal", "bool", "added", "added in fp32"])
def test_attention(dtype, masked) -> None:
    shape = (2, 3, 8, 16)
    mask: dict[str, Any] = {
        "no mask": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.ones(8, 8, dtype=torch.bool).tril()},
        "added": {"attn_mask": numbers(8, 8, dtype=dtype)},
        "added in fp32": {"attn_mask": numbers(8, 8)},
    }[masked]

    def attend(wide: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [numbers(*shape, dtype=dtype, seed=seed).to(wide).requires_grad_() for seed in range(3)]
        options = {k: v.to(wide) if isinstance(v, Tensor) and v.dtype is dtype else v for k, v in mask.items()}
        out = functional.scaled_dot_product_attention(*leaves, **options)
        return out, *torch.autograd.grad(out, leaves, numbers(*shape, dtype=dtype, seed=7).to(wide))

    with wide_matmuls():
        out, *gradients = attend(dtype)
    expected, *expected_gradients = attend(torch.float32)
    assert out.dtype is dtype
    assert torch.equal(out, expected.to(dtype))
    for mine, reference in zip(gradients, expected_gradients, strict=True):  # the backward reads the rounded output
        assert torch.allclose(mine.float(), reference, rtol=0.02, atol=0.02)


@half
def test_into_a_tensor_and_in_place(dtype) -> None:
    a, b, c = A.to(dtype), B.to(dtype), C.to(dtype)
    product = (a.float() @ b.float()).to(dtype)
    with wide_matmuls():
        out = torch.empty(5, 6, dtype=dtype)
        assert torch.mm(a, b, out=out) is out
        assert torch.equal(out, product)
        empty = torch.empty(0, dtype=dtype)
        torch.mm(a, b, out=empty)
        assert torch.equal(empty, product)
        added = c.clone()
        assert added.addmm_(a, b) is added
        assert torch.equal(added, torch.addmm(c.float(), a.float(), b.float()).to(dtype))
        batches = BATCH_C.to(dtype).clone()
        batches.baddbmm_(BATCH_A.to(dtype), BATCH_B.to(dtype))
        assert torch.equal(
            batches, torch.baddbmm(*(x.to(dtype).float() for x in (BATCH_C, BATCH_A, BATCH_B))).to(dtype)
        )


def test_other_dtypes_are_torchs_own() -> None:
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.int64):
        a, b = A.to(dtype), B.to(dtype)
        expected = a @ b
        with wide_matmuls():
            assert torch.equal(a @ b, expected)


@pytest.mark.parametrize("inference", [False, True])
def test_what_torch_refuses_is_refused(inference) -> None:
    with wide_matmuls(), torch.inference_mode(inference):
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.mm(A.bfloat16(), B)
        with pytest.raises(RuntimeError, match="dtype"):
            functional.linear(A.bfloat16(), B.t().bfloat16(), torch.ones(6))
        with pytest.raises(RuntimeError, match="same"):
            functional.conv2d(IMAGE.bfloat16(), KERNEL.bfloat16(), BIAS, groups=2)


class _Below(TorchDispatchMode):
    """Names of the operators that torch computes, with the 16-bit ones among products marked."""

    def __init__(self) -> None:
        super().__init__()
        self.halves: set[str] = set()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen.add(name)
        if any(isinstance(each, Tensor) and each.dtype in HALVES for each in args):
            self.halves.add(name)
        return func(*args, **(kwargs or {}))


_PRODUCT_NAMES = ("mm", "mv", "dot", "conv", "attention", "matmul", "linear", "einsum", "encoder_layer", "rnn_layer")

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "Linear": (lambda: nn.Linear(7, 6), (A,)),
    "Linear, three dimensions": (lambda: nn.Linear(7, 6), (BATCH_A,)),
    "Conv2d": (lambda: nn.Conv2d(4, 8, 3), (IMAGE,)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 8, 3), (numbers(2, 4, 9),)),
    "LSTM": (lambda: nn.LSTM(7, 6, num_layers=2, bidirectional=True), (BATCH_A,)),
    "GRU": (lambda: nn.GRU(7, 6), (BATCH_A,)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2), (numbers(3, 5, 8),) * 3),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (numbers(3, 5, 8),)),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(8, 2, 16), (numbers(3, 5, 8), numbers(4, 5, 8))),
}


class _Einsum(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("bij,bjk->bki", a, b) + torch.matmul(a, b).mT + torch.tensordot(a, b.mT, 3)


MODULES["einsum, matmul, tensordot"] = (_Einsum, (BATCH_A, BATCH_A.mT.contiguous()))


@pytest.mark.parametrize("mode", ["train", "no_grad", "inference"])
@pytest.mark.parametrize("name", MODULES)
def test_no_product_of_a_module_is_left_to_the_16_bit_kernels(name, mode) -> None:
    build, inputs = MODULES[name]
    torch.manual_seed(0)
    module = build().bfloat16().train(mode == "train")
    halves = [each.bfloat16() for each in inputs]
    below = _Below()
    context = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with below, wide_matmuls(), context():
        out = module(*halves)
        out = out[0] if isinstance(out, tuple) else out
        if mode == "train" and out.requires_grad:
            out.sum().backward()
    assert out.dtype is torch.bfloat16
    assert [each for each in below.halves if any(part in each for part in _PRODUCT_NAMES)] == []
    assert [each for each in below.seen if any(part in each for part in _PRODUCT_NAMES)] != []


def test_gradients_of_an_lstm_are_those_of_fp32_up_to_rounding() -> None:
    def gradients(dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.LSTM(7, 6, num_layers=2, bidirectional=True).to(dtype)
        inputs = BATCH_A.detach().to(dtype).requires_grad_()
        with wide_matmuls():
            module(inputs)[0].float().square().sum().backward()
        return [each.grad.float() for each in (inputs, *module.parameters())]

    for wide, narrow in zip(gradients(torch.float32), gradients(torch.bfloat16), strict=True):
        assert (wide - narrow).abs().max() < 0.02 * wide.abs().max()


def test_inference_gives_the_bits_of_training() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 32), nn.GELU(), nn.Linear(32, 6)).bfloat16()
    with wide_matmuls():
        trained = module(BATCH_A.bfloat16())
        with torch.inference_mode():
            assert torch.equal(module(BATCH_A.bfloat16()), trained)


def test_entered_twice_it_is_entered_once() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    with wide_matmuls():
        with wide_matmuls():
            assert len(_get_current_dispatch_mode_stack()) == 1
        assert len(_get_current_dispatch_mode_stack()) == 1
    assert len(_get_current_dispatch_mode_stack()) == 0


def chosen(dtype: torch.dtype, **settings: Any) -> bool:
    return chosen_wide_matmuls(Settings(**settings), dtype, SoloCommunicator(), CPU)


@half
def test_it_is_chosen_where_the_processor_is_slow(dtype) -> None:
    assert chosen(dtype) == (not has_arithmetic(dtype) and slowdown(dtype) >= SLOW)


@pytest.mark.parametrize(("slow", "stalled"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.bfloat16)])
def test_a_busy_machine_changes_no_choice(slow: bool, stalled: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements as on a busy machine: fp32's products were kept waiting each of the few times that they were
    timed."""
    clock_s = 0.0
    calls = dict.fromkeys((torch.bfloat16, torch.float32), 0)

    def mm(left: torch.Tensor, right: torch.Tensor) -> None:
        nonlocal clock_s
        calls[left.dtype] += 1
        clock_s += 1e-3 if slow and left.dtype is torch.bfloat16 else 1e-4
        if left.dtype is stalled and calls[left.dtype] <= (45 if slow else 12):
            clock_s += 1e-2

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr("lightning_ptm.trainer.matmul_precision.time", types.SimpleNamespace(monotonic=lambda: clock_s))
    assert (slowdown(torch.bfloat16) >= SLOW) == slow


@half
def test_settings_choose(dtype, caplog) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch"):  # which other tests make quiet
        assert chosen(dtype, tuning={"matmul_precision": "fp32"})
        assert not chosen(dtype, tuning={"matmul_precision": "native"})
        assert not chosen(torch.float32, tuning={"matmul_precision": "fp32"})
    assert [record.getMessage() for record in caplog.records] == [
        f"Tuning(matmul_precision='fp32'): products of {str(dtype)[6:]} are computed in fp32 and rounded once"
    ]


def test_wrong_settings_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"matmul_precision='slow'\): use 'auto', 'native' or 'fp32'"):
        Settings(tuning={"matmul_precision": "slow"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is for CPUs without 16-bit arithmetic.*leave it at 'auto'"):
        chosen_wide_matmuls(
            Settings(tuning={"matmul_precision": "fp32"}),
            torch.bfloat16,
            SoloCommunicator(),
            AcceleratorBackend(torch.device("cuda:0")),
        )


# -- higher-order operators ------------------------------------------------------------------------------------------------


def conditional(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 1e9, lambda a: linear(a) * 2, lambda a: linear(a), (x,))  # type: ignore[no-any-return]


def attention(linear: nn.Module, x: Tensor) -> Tensor:
    heads = linear(x)[None, None]
    return flex_attention(heads, heads, heads)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "compute", "grad"),
    [("cond", conditional, False), ("cond", conditional, True), ("flex_attention", attention, False)],
)
def test_higher_order_operators_are_refused_and_work_behind_that(name, compute, grad) -> None:
    """Also where they get gradients, which torch's `flex_attention` has not on CPUs."""
    linear, x = nn.Linear(16, 16).bfloat16(), numbers(16, 16).bfloat16()
    with torch.set_grad_enabled(grad):
        with (
            wide_matmuls(),
            pytest.raises(ConfigError, match=rf"{name} always needs torch.compile.*matmul_precision='native'"),
        ):
            compute(linear, x)
        result = compute(linear, x)
    assert result.isfinite().all()
    if grad:
        result.sum().backward()
        assert linear.weight.grad is not None

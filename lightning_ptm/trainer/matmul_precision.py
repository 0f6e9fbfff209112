"""Products of 16-bit tensors on a CPU that has no 16-bit arithmetic: computed in fp32 and rounded once.

There, torch's kernels for matrices of bfloat16 and float16 are plain loops, 10 to 100 times slower than those of fp32. Owns
the list of operators that count as products (matrix products, attention, convolutions, and their backward passes), and
the decision whether a run needs this. Knows nothing of pages: they stay 16-bit.

I1: a product is what its operator gives for the same numbers in fp32, rounded once to the 16-bit dtype: what kernels with
16-bit arithmetic give, up to the order of their sums. I2: all other operators, and products of other dtypes or of several,
are torch's own. I3: it holds in the thread that entered it, and costs some microseconds an operator.
"""

from __future__ import annotations

import functools
import math
import sys
import time
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_ptm import torch_internals
from lightning_ptm.comm import Communicator
from lightning_ptm.config import Settings
from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.torch_internals import (
    HIGHER_ORDER_FOLDER,
    PRODUCTS,
    HigherOrderOperator,
    TorchDispatchMode,
    can_decompose,
    forget_compiled_code,
    modes_of_thread,
    scaled_attention,
    scaled_attention_backward,
)

HALVES = (torch.bfloat16, torch.float16)

SLOW = 4.0
"""From how many times fp32's time on a 16-bit product is slow. Processors with 16-bit arithmetic take 0.3 to 1.5 times as
long as for fp32, those without 8 to 70 times."""

_SIDE = 128
_LEAST_ROUNDS = 5
_MOST_ROUNDS = 40

_CALLING_HIGHER_ORDER = tuple(str(folder) for folder in (HIGHER_ORDER_FOLDER, Path(torch.nn.attention.__file__).parent))
"""Where the functions are that torch compiles to call higher-order operators."""

_aten = torch.ops.aten

_IN_PLACE = {_aten.addmm_.default, _aten.addmv_.default, _aten.addbmm_.default, _aten.baddbmm_.default}

_INTO = {
    _aten.mm.out,
    _aten.bmm.out,
    _aten.mv.out,
    _aten.dot.out,
    _aten.addmm.out,
    _aten.addmv.out,
    _aten.addbmm.out,
    _aten.baddbmm.out,
}
"""Those that write to a tensor `out`."""

_PRODUCTS = {
    _aten.mm.default,
    _aten.bmm.default,
    _aten.mv.default,
    _aten.dot.default,
    _aten.vdot.default,
    _aten.addmm.default,
    _aten.addmv.default,
    _aten.addbmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten.conv_tbc.default,
    _aten.mkldnn_rnn_layer.default,
    _aten.mkldnn_rnn_layer_backward.default,
    scaled_attention,
    scaled_attention_backward,
    *PRODUCTS,
    *_IN_PLACE,
    *_INTO,
}

_ALWAYS_FP32 = {scaled_attention: 3, scaled_attention_backward: 5}
"""Of how many arguments, from the first, the dtype says whether it is a product of 16-bit tensors: the mask may be of
another dtype, and attention's logarithms of sums are fp32, as its second output is."""


class WideMatmuls(TorchDispatchMode):
    """Inside, in this thread, products of 16-bit tensors are computed in fp32 and rounded once, forward and backward.

    Higher-order operators (`torch.cond`, `flex_attention`) are refused: torch compiles what calls them, so that gradients
    find the parameters that are used inside, and compiles nothing inside of modes.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            _refuse(func)
        if func in _PRODUCTS:
            deciding = args[: _ALWAYS_FP32[func]] if func in _ALWAYS_FP32 else (*args, *kwargs.values())
            half = _half_of(deciding)
            return func(*args, **kwargs) if half is None else _wide(func, args, kwargs, half)
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:  # nothing has taken it apart yet: a linear layer, an einsum
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


def _refuse(func: Any) -> NoReturn:
    # torch remembers for good what it could not compile, and runs without this mode may still come here.
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_CALLING_HIGHER_ORDER):
            forget_compiled_code(frame.f_code)
        frame = frame.f_back
    raise ConfigError(
        f"{func.name()} is compiled by torch wherever it is called, which it cannot be while products of 16-bit tensors are "
        f"computed in fp32 on this CPU; set tuning=Tuning(matmul_precision='native'), or precision='32-true', or "
        f"write it with ordinary "
        f"operators (torch.where, torch.nn.functional.scaled_dot_product_attention)"
    )


@contextmanager
def wide_matmuls() -> Iterator[None]:
    """`WideMatmuls`, where it is not entered already."""
    if any(isinstance(mode, WideMatmuls) for mode in modes_of_thread()):
        yield
        return
    with WideMatmuls():
        yield


@functools.cache
def _is_composite(func: Any) -> bool:
    return bool(can_decompose(func))


def _half_of(values: tuple[Any, ...]) -> torch.dtype | None:
    """The 16-bit dtype that all floating-point tensors have; None where they do not have one in common."""
    found = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    dtype = found.pop() if len(found) == 1 else None
    return dtype if dtype in HALVES else None


def _wide(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], half: torch.dtype) -> Any:
    wide_args = tuple(_widened(value) for value in args)
    wide_kwargs = {name: _widened(value) for name, value in kwargs.items()}
    result = func(*wide_args, **wide_kwargs)
    if func in _IN_PLACE:
        return args[0].copy_(result)
    if func in _INTO:
        out: Tensor = kwargs["out"]
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)
    if func is scaled_attention:
        return result[0].to(half), result[1]
    return result.to(half) if isinstance(result, Tensor) else tuple(_rounded(each, half) for each in result)


def _rounded(value: Any, half: torch.dtype) -> Any:
    return value.to(half) if isinstance(value, Tensor) and value.dtype is torch.float32 else value


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def products_here(dtype: torch.dtype, backend: Backend) -> AbstractContextManager[None]:
    """Inside, code outside of runs computes products of `dtype` as a run here does if nobody says otherwise: to be measured
    beside runs, or compared with them."""
    return wide_matmuls() if not backend.apart and _slowdown_here(dtype) >= SLOW else nullcontext()


@functools.cache
def _slowdown_here(dtype: torch.dtype) -> float:
    """`slowdown`, measured once and only where torch says that the processor has no arithmetic for `dtype`; 1 elsewhere."""
    return slowdown(dtype) if dtype in HALVES and not has_arithmetic(dtype) else 1.0


def slowdown(dtype: torch.dtype) -> float:
    """How many times as long as one of fp32 a product of `dtype` takes here, over the orders in which training has them.

    The least times of several rounds on one thread: others that use the machine meanwhile only add to a time. Numbers depend
    on the answer, so a processor is not called fast before many rounds have said so.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        half, fp32 = _Products(dtype), _Products(torch.float32)
        for done in range(1, _MOST_ROUNDS + 1):
            half.compute()
            fp32.compute()
            if done >= _LEAST_ROUNDS and half.least_s() >= SLOW * fp32.least_s():
                break
        return half.least_s() / fp32.least_s()
    finally:
        torch.set_num_threads(threads)


class _Products:
    """Small products, one for each order of the elements, and the least time that each took."""

    def __init__(self, dtype: torch.dtype) -> None:
        left, right = (torch.ones(_SIDE, _SIDE, dtype=dtype) for _ in range(2))
        self._pairs = ((left, right), (left, right.t()), (left.t(), right))
        self._least_s = [math.inf] * len(self._pairs)

    def compute(self) -> None:
        for index, pair in enumerate(self._pairs):
            began_s = time.monotonic()
            torch.mm(*pair)
            self._least_s[index] = min(self._least_s[index], time.monotonic() - began_s)

    def least_s(self) -> float:
        return sum(self._least_s)


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether torch has kernels for this processor's 16-bit arithmetic."""
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    return torch.backends.mkldnn.is_available() and torch_internals.has_arithmetic(name)


def chosen_wide_matmuls(settings: Settings, dtype: torch.dtype, communicator: Communicator, backend: Backend) -> bool:
    """Whether products of a run that computes in `dtype` are wide: what rank 0 finds, on all ranks. Collective where
    `matmul_precision="auto"` and the dtype has 16 bits on a CPU.

    Raises:
        ConfigError: `matmul_precision="fp32"` on a GPU.
    """
    if backend.apart:
        if settings.tuning.matmul_precision == "fp32":
            raise ConfigError(
                f"matmul_precision='fp32' is for CPUs without 16-bit arithmetic, and this run computes on {backend.device}; "
                f"leave it at 'auto', or set precision='32-true'"
            )
        return False
    if dtype not in HALVES or settings.tuning.matmul_precision == "native":
        return False
    name = str(dtype).removeprefix("torch.")
    if settings.tuning.matmul_precision == "fp32":
        rank_zero_info(f"matmul_precision='fp32': products of {name} are computed in fp32 and rounded once")
        return True
    times = communicator.broadcast_object(_slowdown_here(dtype) if communicator.rank == 0 else None)
    if times < SLOW:
        return False
    rank_zero_info(
        f"this CPU has no arithmetic for {name} (a product takes {times:.0f} times as long as in fp32): matrix products, "
        f"attention and convolutions of {name} are computed in fp32 and rounded once; matmul_precision='native' leaves "
        f"them to the CPU"
    )
    return True

"""Cross-entropy in slices, against torch's own of whole logits: numbers, memory, products, and runs in pages."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.memory import strategy_with
from kit.twins import compare
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from lightning_ptm.errors import ConfigError
from lightning_ptm.models import GPT, T5MoE
from lightning_ptm.parallel import sliced_loss
from lightning_ptm.parallel.sliced_loss import sliced_cross_entropy
from lightning_ptm.torch_internals import TorchDispatchMode, tree_leaves

BATCH, LENGTH, WIDTH, CLASSES, TOKENS = 2, 30, 8, 50, 16
IGNORED = 7
ROUNDING = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 0.02, torch.float16: 0.003}
"""The largest difference of gradients, as a fraction of the largest gradient."""


def head_of(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, CLASSES, bias=bias).to(dtype)


def batch_of(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    targets = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=generator)
    return x.to(dtype), targets.masked_fill(torch.rand(targets.shape, generator=generator) < 0.3, IGNORED)


def by_torch(head: nn.Module, x: Tensor, targets: Tensor, *, z_loss: float = 0.0, **options: Any) -> Tensor:
    """The same loss of whole logits."""
    logits = head(x).flatten(0, 1)
    logits = logits.float() if logits.dtype.itemsize == 2 else logits
    found = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, **options)
    if z_loss:
        counted = (targets != IGNORED).flatten()
        squares = z_loss * logits.logsumexp(-1).square() * counted
        sums = {"none": squares, "sum": squares.sum(), "mean": squares.sum() / counted.sum()}
        found = found + sums[options.get("reduction", "mean")]
    return found


def learnt(loss: Any, head: nn.Module, x: Tensor, targets: Tensor, **options: Any) -> list[Tensor]:
    """The loss, and the gradients of the input and of the head's parameters."""
    x = x.clone().requires_grad_()
    found = loss(head, x, targets, **options)
    weights = torch.linspace(0.5, 1.5, found.numel(), dtype=found.dtype).view(found.shape)
    gradients = torch.autograd.grad((found * weights).sum(), [x, *head.parameters()])
    return [found.detach().flatten(), *gradients]


def assert_near(ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype is other.dtype and mine.shape == other.shape
        assert (mine - other).abs().max() <= ROUNDING[dtype] * other.abs().max()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01}, {"label_smoothing": 0.2, "z_loss": 0.1}]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_numbers_are_those_of_whole_logits(dtype: torch.dtype, options: dict[str, float], reduction: str) -> None:
    for bias, tokens in ((False, TOKENS), (True, 59)):
        head, batch = head_of(dtype, bias=bias), batch_of(dtype)
        ours = learnt(
            sliced_cross_entropy, head, *batch, tokens=tokens, ignore_index=IGNORED, reduction=reduction, **options
        )
        assert_near(ours, learnt(by_torch, head, *batch, reduction=reduction, **options), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_chooses_the_dtype_of_the_products(dtype: torch.dtype) -> None:
    head, batch = head_of(), batch_of()
    with torch.autocast("cpu", dtype=dtype):
        ours = learnt(sliced_cross_entropy, head, *batch, tokens=TOKENS, ignore_index=IGNORED)
        theirs = learnt(by_torch, head, *batch)
    assert_near(ours, theirs, dtype)
    assert torch.equal(ours[0], theirs[0]) and ours[0].dtype is torch.float32


def test_small_gradients_of_fp16_are_those_of_the_scaled_loss() -> None:
    """Without the loss scale most of them would be 0."""
    head, batch = head_of(torch.float16), batch_of(torch.float16)
    scale = 2.0**15

    def scaled(loss: Any) -> Any:
        return lambda *given, **options: loss(*given, **options) * 1e-4 * scale

    ours = learnt(scaled(sliced_cross_entropy), head, *batch, tokens=TOKENS, ignore_index=IGNORED)
    assert_near(ours, learnt(scaled(by_torch), head, *batch), torch.float16)
    assert ours[1].count_nonzero() > ours[1].numel() / 2


def test_at_most_one_slice_is_todays_code() -> None:
    head, (x, targets) = head_of(), batch_of()
    ours = learnt(sliced_cross_entropy, head, x, targets, ignore_index=IGNORED)
    theirs = learnt(by_torch, head, x, targets)
    assert all(map(torch.equal, ours, theirs))


def test_a_slice_has_256_mib_of_logits_in_whole_blocks_of_products() -> None:
    fitting = sliced_loss._fitting_tokens
    assert fitting(50257, torch.bfloat16) == fitting(50257, torch.float32) == 3 * 384
    assert fitting(50257, torch.float64) == 384
    assert fitting(10**7, torch.float32) == 384


def test_losses_without_a_token_are_as_in_torch() -> None:
    head, (x, targets) = head_of(), batch_of()
    targets = torch.full_like(targets, IGNORED)
    ours = learnt(sliced_cross_entropy, head, x, targets, tokens=TOKENS, ignore_index=IGNORED)
    assert ours[0].isnan() and not any(each.count_nonzero() for each in ours[1:])
    with pytest.raises(IndexError):
        sliced_cross_entropy(head, x, targets + CLASSES, tokens=TOKENS)


def test_a_second_backward_computes_the_gradients_again() -> None:
    head, (x, targets) = head_of(), batch_of()
    loss = sliced_cross_entropy(head, x, targets, tokens=TOKENS)
    first = torch.autograd.grad(3 * loss, [*head.parameters()], retain_graph=True)
    second = torch.autograd.grad(3 * loss, [*head.parameters()])
    assert_near([*second], [*first], torch.float32)


def test_only_gradients_that_are_wanted_are_computed() -> None:
    head, (x, targets) = head_of(), batch_of()
    head.weight.requires_grad_(False)
    x.requires_grad_()
    sliced_cross_entropy(head, x, targets, tokens=TOKENS).backward()
    assert head.weight.grad is None and head.bias.grad is not None and x.grad is not None


@pytest.mark.parametrize(
    ("dtype", "reduction", "products"),
    [(torch.float32, "mean", 3), (torch.bfloat16, "mean", 3), (torch.float16, "mean", 4), (torch.float32, "none", 4)],
)
def test_a_step_has_the_products_of_whole_logits(dtype: torch.dtype, reduction: str, products: int) -> None:
    head, (x, targets) = head_of(dtype), batch_of(dtype)
    one = 2 * targets.numel() * WIDTH * CLASSES
    with FlopCounterMode(display=False) as counter:
        loss = sliced_cross_entropy(head, x.requires_grad_(), targets, tokens=TOKENS, reduction=reduction)
        loss.sum().backward()
    assert counter.get_total_flops() == products * one
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        sliced_cross_entropy(head, x, targets, tokens=TOKENS)
    assert counter.get_total_flops() == one


class LiveBytes(TorchDispatchMode):
    """Bytes of results that exist at once: `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and id(storage) not in self._known:
                self._known.add(id(storage))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
        return out

    def _gone(self, key: int, count: int) -> None:
        self._known.discard(key)
        self.now -= count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_falls_by_more_than_whole_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head, count = nn.Linear(16, 2000, bias=False).to(dtype), 1536
    x, targets = torch.randn(count, 16).to(dtype).requires_grad_(), torch.randint(0, 2000, (count,))
    peaks = []
    for tokens in (count, count // 8):
        with LiveBytes() as live:
            sliced_cross_entropy(head, x, targets, tokens=tokens).backward()
        peaks.append(live.peak)
        head.weight.grad = x.grad = None
    assert peaks[0] - peaks[1] > 0.8 * count * 2000 * 4
    assert peaks[1] < 4 * count // 8 * 2000 * 4


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_heads_that_are_more_than_a_linear_layer_get_the_logits_that_they_expect() -> None:
    batch = batch_of()
    seen: list[torch.Size] = []
    hooked, cast, own, adapted = head_of(), head_of(), Own(WIDTH, CLASSES), head_of()
    hooked.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    cast.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    adapted.forward = lambda x: F.linear(x, adapted.weight, adapted.bias) * 3  # type: ignore[method-assign]
    weighted = head_of()
    parametrize.register_parametrization(weighted, "weight", Doubled())
    for head in (hooked, cast, own, adapted, weighted, nn.Sequential(head_of(), nn.Tanh())):
        ours = learnt(sliced_cross_entropy, head, *batch, tokens=TOKENS, ignore_index=IGNORED)
        assert_near(ours, learnt(by_torch, head, *batch), torch.float32)
    assert seen == [(BATCH, LENGTH, CLASSES)] * 2


def test_wrong_arguments_are_refused() -> None:
    head, (x, targets) = head_of(), batch_of()
    with pytest.raises(ConfigError, match="tokens=0 and reduction='mean'"):
        sliced_cross_entropy(head, x, targets, tokens=0)
    with pytest.raises(ConfigError, match="reduction='max'"):
        sliced_cross_entropy(head, x, targets, reduction="max")
    with pytest.raises(ConfigError, match="GPT got loss_tokens=0, with which no logits"):
        GPT(loss_tokens=0)
    with pytest.raises(ConfigError, match="T5MoE got loss_tokens=-1"):
        T5MoE(loss_tokens=-1)


# -- runs -------------------------------------------------------------------------------------------------------------


class Noted:
    """Notes the losses of training steps."""

    losses: list[Tensor]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)  # type: ignore[misc]
        self.__dict__.setdefault("losses", []).append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)  # type: ignore[attr-defined]


class NotedGPT(Noted, GPT):
    pass


class NotedT5MoE(Noted, T5MoE):
    pass


SMALL = {"vocab_size": 96, "width": 32, "layers": 3, "heads": 2, "loss_tokens": 8}


def gpt() -> GPT:
    return NotedGPT(**SMALL, sequence_length=16, tie_head=True, dropout=0.1)


def t5_moe() -> T5MoE:
    return NotedT5MoE(**SMALL, experts=4)


def texts(count: int = 4) -> DataLoader[Any]:
    tokens = torch.randint(0, 96, (2 * count, 17), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2)


TIGHT = {"device_memory": "least", "offload_parameters": "disk", "offload_optimizer": "disk"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", [gpt, t5_moe])
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        (TIGHT, {"precision": "64-true", "gradient_clip_val": 0.1}),
        (TIGHT | {"recompute": "all"}, {"accumulate_grad_batches": 2}),
        ({"lock_free": {"max_staleness": 0}, "device_memory": "2MiB"}, {"precision": "bf16-true"}),
    ],
)
def test_runs_in_pages_have_the_numbers_of_a_plain_trainer(
    build: Any, settings: dict[str, Any], options: dict[str, Any], tmp_path: Any
) -> None:
    strategy = strategy_with(page_size="64KiB", disk_path=str(tmp_path), debug={"poison": True}, **settings)
    module = compare(build, strategy, texts(), **options)
    assert len(module.losses) == 4

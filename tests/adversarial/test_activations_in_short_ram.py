"""Whole fits with activations on disk or batches in slices, compared with a plain Trainer. Functions that report free RAM are
patched to report none."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import fit
from kit.memory import LEAST, strategy_with
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ptm.errors import UsageError
from lightning_ptm.models import GPT
from lightning_ptm.runtime.autograd import offload
from lightning_ptm.runtime.autograd.activation_policy import ActivationPolicy
from lightning_ptm.runtime.autograd.slices import sizes_of
from lightning_ptm.runtime.machine.heap import Heap

WIDTH, VOCABULARY, SLICES = 64, 61, 3
SHAPES = [(4, 16), (7, 9), (1, 20), (4, 4), (9, 3), (2, 33), (12, 16), (4, 16)]
"""Samples and tokens of each batch: more samples than tokens, as many, and fewer samples than slices."""


@pytest.fixture(autouse=True)
def short_ram(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """RAM has room for nothing, for some of a unit's tensors, or for all, in turn."""
    asked: list[int] = []
    room = itertools.cycle([0, 0, 30_000, 1 << 40, 0])

    def left_bytes(_: Heap) -> int:
        asked.append(1)
        return next(room)

    # Of recompute="auto": short from half of what the first call finds.
    monkeypatch.setattr(ActivationPolicy, "_needed_bytes", lambda policy, _: 1 << 39)
    free = itertools.cycle([1 << 40, 1 << 40, 1 << 30, 1 << 40, 1 << 30, 1 << 38, 1 << 30])
    monkeypatch.setattr(ActivationPolicy, "_look", lambda policy, _: setattr(policy, "_free", next(free)))
    monkeypatch.setattr(offload, "LEAST_BYTES", 512)
    monkeypatch.setattr(Heap, "left_bytes", left_bytes)
    yield asked


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Adapted(nn.Module):
    """A frozen layer and an adapter of rank 4, as LoRA has."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.base = nn.Linear(inside, outside, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(inside, 4, bias=False), nn.Linear(4, outside, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x)))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """RMS norms, attention with half as many keys as queries, a gated MLP."""

    def __init__(self, dropout: float, adapted: bool) -> None:
        super().__init__()

        def linear(inside: int, outside: int) -> nn.Module:
            return Adapted(inside, outside) if adapted else nn.Linear(inside, outside, bias=False)

        self.norms = nn.ModuleList([RMSNorm(), RMSNorm()])
        self.query, self.key, self.value = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH // 2), linear(WIDTH, WIDTH // 2)
        self.out = linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = linear(WIDTH, 3 * WIDTH), linear(WIDTH, 3 * WIDTH), linear(3 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        query, key, value = (
            each(normed).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        normed = self.norms[1](x)
        return x + self.dropout(self.down(functional.silu(self.gate(normed)) * self.up(normed)))


class InSlices(nn.Module):
    """A block that a plain run computes in the order of a sliced one."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.block(each) for each in reversed(x.split(sizes_of(len(x), SLICES)))][::-1])


class Llama(L.LightningModule):
    def __init__(self, dropout: float = 0.0, adapted: bool = False, sliced: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(not adapted)
        self.blocks = nn.ModuleList(LlamaBlock(dropout, adapted) for _ in range(3))
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.sliced = sliced
        self.losses: list[Tensor] = []

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = InSlices(block)(x) if self.sliced else block(x)
        logits = self.head(self.norm(x))[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach().clone())
        return loss

    def training_step(self, batch: Tensor, index: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, fused=True)


class OurGPT(GPT):
    """Our GPT with the optimizer of the other modules."""

    losses: Sequence[Tensor] = ()
    configure_optimizers = Llama.configure_optimizers  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCABULARY, width=WIDTH, layers=3, heads=4, sequence_length=48)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step((batch[:, :-1].contiguous(), batch[:, 1:].contiguous()), index)


class Manual(Llama):
    """Steps by hand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.passes(batch)
        optimizer.step()

    def passes(self, batch: Tensor) -> None:
        raise NotImplementedError


class Retained(Manual):
    """Two backward passes through a graph, and one of another graph between them."""

    def passes(self, batch: Tensor) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(self.loss(batch.flip(0)))
        self.manual_backward(loss * 0.5)


def in_a_thread(compute: Callable[[], None]) -> None:
    """Computes in another thread, and waits for it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            compute()
        except BaseException as error:  # raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


class OtherThreads(Manual):
    """The backward in another thread; in each second step the forward, too."""

    def passes(self, batch: Tensor) -> None:
        losses: list[Tensor] = []
        if len(self.losses) % 2:
            in_a_thread(lambda: losses.append(self.loss(batch)))
        else:
            losses.append(self.loss(batch))
        in_a_thread(lambda: self.manual_backward(losses[0]))


class BreaksError(Exception):
    """Raised in the middle of a step."""


class Breaks(Llama):
    """The third step ends with an error: after its forward, in a block, or in the backward."""

    def __init__(self, where: str, **options: Any) -> None:
        super().__init__(**options)
        self.where = where

    def training_step(self, batch: Tensor, index: int) -> Any:
        if index != 2 or not self.where:
            return self.loss(batch)
        if self.where == "block":
            with self.blocks[1].norms[1].register_forward_pre_hook(self.breaks):  # type: ignore[union-attr, index, operator]
                return self.loss(batch)
        if self.where == "backward":
            x = self.blocks[1](self.blocks[0](self.embedding(batch)))
            x.register_hook(self.breaks)
            return self.blocks[2](x).sum()
        return self.breaks(self.loss(batch))

    def breaks(self, *_: Any) -> None:
        raise BreaksError


MODELS: dict[str, Callable[..., Any]] = {
    "gpt": OurGPT,
    "llama": Llama,
    "dropout": lambda **options: Llama(dropout=0.2, **options),
    "adapters": lambda **options: Llama(adapted=True, **options),
    "retained": lambda **options: Retained(dropout=0.1, **options),
    "threads": lambda **options: OtherThreads(dropout=0.1, **options),
}

HOMES: dict[str, dict[str, Any]] = {
    "tight": {"device_memory": LEAST, "page_size": 65536},
    "disk": {
        "device_memory": LEAST,
        "page_size": 65536,
        "offload_optimizer": "disk",
        "offload_parameters": "disk",
    },
}


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data: Any = [torch.randint(0, VOCABULARY, shape, generator=generator) for shape in SHAPES]
    return DataLoader(data, batch_size=None)


Trained = tuple[list[Tensor], dict[str, Tensor]]


def trained(build: Callable[[], Any], strategy: Any) -> Trained:
    """Losses, and weights after a fit."""
    torch.manual_seed(3)
    module = build()
    manual = not module.automatic_optimization
    fit(module, batches(), strategy, max_epochs=1, accumulate_grad_batches=1 if manual else 2)
    return list(module.losses), {name: each.detach().clone() for name, each in module.state_dict().items()}


def assert_equal(ours: Trained, theirs: Trained) -> None:
    assert len(ours[0]) == len(theirs[0]) and all(map(torch.equal, ours[0], theirs[0]))
    assert [name for name, each in theirs[1].items() if not torch.equal(ours[1][name], each)] == []


@pytest.mark.slow_unless(
    "gpt-none-disk", "adapters-all-tight", "retained-none-tight", "threads-auto-disk", "llama-auto-tight"
)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("recompute", ["none", "all", "auto"])
@pytest.mark.parametrize("model", MODELS)
def test_activations_on_disk(model: str, recompute: str, home: str, tmp_path: Path, short_ram: list[int]) -> None:
    to = "auto" if recompute == "auto" else "disk"
    strategy = strategy_with(disk_path=tmp_path, offload_activations=to, recompute=recompute, **HOMES[home])
    assert_equal(trained(MODELS[model], strategy), trained(MODELS[model], "auto"))
    assert len(short_ram) > len(SHAPES)


@pytest.mark.slow_unless("llama-disk-tight", "adapters-none-disk", "retained-disk-disk", "threads-none-tight")
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("activations", ["none", "disk"])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "gpt"])
def test_slices(model: str, activations: str, home: str, tmp_path: Path) -> None:
    strategy = strategy_with(disk_path=tmp_path, offload_activations=activations, slices=SLICES, **HOMES[home])
    expected = trained(lambda: MODELS[model](sliced=True), "auto")
    assert_equal(trained(MODELS[model], strategy), expected)
    if model == "llama":
        torch.testing.assert_close(expected[0], trained(Llama, "auto")[0], rtol=0, atol=1e-5)


@pytest.mark.slow_unless("backward-none-disk", "block-slices-tight")
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    "settings", [{"recompute": "none"}, {"recompute": "all"}, {"slices": SLICES}], ids=["none", "all", "slices"]
)
@pytest.mark.parametrize("where", ["step", "block", "backward"])
def test_a_fit_after_one_that_an_error_has_ended(
    where: str, settings: dict[str, Any], home: str, tmp_path: Path
) -> None:
    def twice(made: Callable[[], Any], module: Breaks) -> Trained:
        with pytest.raises(BreaksError):
            trained(lambda: module, made())
        module.where = ""
        return trained(lambda: module, made())

    def build(sliced: bool) -> Breaks:
        torch.manual_seed(3)
        return Breaks(where, sliced=sliced)

    ours = twice(
        lambda: strategy_with(disk_path=tmp_path, offload_activations="disk", **settings, **HOMES[home]), build(False)
    )
    assert_equal(ours, twice(lambda: "auto", build("slices" in settings)))
    assert list(tmp_path.iterdir()) == []


class Penalty(Manual):
    """A penalty on the gradient of a unit's input, which takes a second backward."""

    def passes(self, batch: Tensor) -> None:
        x = self.embedding(batch).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.blocks[0](x).sum(), x, create_graph=True)
        self.manual_backward(gradient.pow(2).sum())


@pytest.mark.parametrize("settings", [{"recompute": "none"}, {"recompute": "all"}, {"slices": 2}], ids=str)
def test_double_backward_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    strategy = strategy_with(disk_path=tmp_path, offload_activations="disk", **settings)
    with pytest.raises(UsageError, match="double backward"):
        trained(Penalty, strategy)


class AtOnce(Manual):
    """Two threads that compute at the same time: both a forward, both a backward, or one of each."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.kinds = kinds

    def passes(self, batch: Tensor) -> None:
        both = threading.Barrier(2)

        def waiting(*_: Any) -> None:
            both.wait(5)

        def forward() -> None:
            x = self.embedding(batch)
            with self.blocks[0].norms[0].register_forward_hook(waiting):  # type: ignore[union-attr, index, operator]
                self.blocks[0](x)

        def backward_of(loss: Tensor) -> Callable[[], None]:
            return lambda: self.manual_backward(loss)

        works: list[Callable[[], None]] = []
        for kind in self.kinds:
            if kind == "f":
                works.append(forward)
            else:
                x = self.blocks[0](self.embedding(batch))
                x.register_hook(waiting)
                works.append(backward_of(x.sum()))
        errors: list[BaseException] = []

        def run(work: Callable[[], None]) -> None:
            try:
                work()
            except threading.BrokenBarrierError:
                pass  # the other one was refused
            except BaseException as error:  # raised again below
                errors.append(error)
                both.abort()

        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error


@pytest.mark.parametrize("kinds", ["ff", "bb", "fb"])
@pytest.mark.parametrize("home", HOMES)
def test_two_threads_at_once_are_refused(kinds: str, home: str, tmp_path: Path) -> None:
    strategy = strategy_with(disk_path=tmp_path, offload_activations="disk", **HOMES[home])
    with pytest.raises(UsageError, match=r"began in a thread while .* was computed in another one"):
        trained(lambda: AtOnce(kinds), strategy)

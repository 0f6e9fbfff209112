"""Comparison of a training by a plain PyTorch loop with the same training by the strategy. Both yield an `Outcome` to
be compared bitwise.

The plain side knows nothing of the strategy. Under bf16-mixed it keeps a bf16 copy of the parameters that computes, fp32
masters that a stock optimizer updates, and gradients in bf16 which become fp32 after each backward pass, and are added up
there, as a Trainer's do whose parameters are fp32; the true precisions cast the module and update it directly.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from kit.fits import quiet_trainer
from kit.outcomes import Outcome
from kit.products import products_of
from lightning_ptm import AngelPTMStrategy

DTYPES = {
    "bf16-mixed": torch.bfloat16,
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}


class TrainModule(L.LightningModule):
    """Base of the tests' modules: a subclass defines `loss`, which may return None; losses are recorded.

    Class attributes say what `configure_optimizers` returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def make_optimizer(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    def make_schedule(self, optimizer: Optimizer) -> Any:
        """A scheduler that steps after each optimizer step, or None."""
        return None

    def loss(self, batch: Any, index: int) -> Tensor | None:
        raise NotImplementedError

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        loss = self.loss(batch, index)
        if loss is not None:
            self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer()
        schedule = self.make_schedule(optimizer)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _only(items: list[Any]) -> Any:
    return items[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Batches(Dataset[Any]):
    """A list of ready batches as a data set; nobody changes them."""

    items: Sequence[Any]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def loader(self) -> DataLoader[Any]:
        # Not batch_size=None: Lightning takes such a loader for a shuffled one.
        # A generator of its own: a loader draws its seed from the global one, which dropout uses.
        return DataLoader(self, batch_size=1, collate_fn=_only, generator=torch.Generator().manual_seed(0))


def tokens(count: int, *, vocabulary: int = 97, shape: tuple[int, int] = (4, 17), seed: int = 1) -> Batches:
    """`count` batches of token ids."""
    generator = torch.Generator().manual_seed(seed)
    return Batches([torch.randint(0, vocabulary, shape, generator=generator) for _ in range(count)])


def vectors(count: int, *shape: int, seed: int = 1) -> Batches:
    """`count` batches of normal numbers of a shape."""
    generator = torch.Generator().manual_seed(seed)
    return Batches([torch.randn(*shape, generator=generator) for _ in range(count)])


# -- the plain side ---------------------------------------------------------------------------------------------------


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    return type(batch)(_cast(item, dtype) for item in batch)


class PlainOptimizer:
    """A stock optimizer over masters: `step` and `zero_grad` in the words of Lightning's manual optimization.

    Args:
        masters: by id of parameter, of other optimizers, which share them; gets those of this one.
    """

    def __init__(self, optimizer: Optimizer, precision: str, kept_whole: set[int], masters: dict[int, Tensor]) -> None:
        self.optimizer = optimizer
        self.clip: Callable[[list[Tensor]], object] | None = None
        self.steps = 0
        self.in_pass = False
        self.pairs: list[tuple[nn.Parameter, Tensor]] = []
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                if not precision.endswith("mixed") or id(parameter) in kept_whole:
                    self.pairs.append((parameter, parameter))
                    continue
                known = masters.get(id(parameter))
                master = masters[id(parameter)] = (
                    parameter.detach().clone().requires_grad_() if known is None else known
                )
                self.pairs.append((parameter, master))
                group["params"][place] = master
                if parameter.requires_grad and known is None:
                    parameter.register_post_accumulate_grad_hook(partial(self._arrived, master))

    def _arrived(self, master: Tensor, parameter: Tensor) -> None:
        if not self.in_pass:  # a pass of the module's own
            _add_to_master(master, parameter)

    def backward(self, loss: Tensor, others: Sequence[PlainOptimizer] = (), **options: Any) -> None:
        """A backward pass; what several calls of a reentrant checkpoint add to a gradient is 16-bit, as in one graph."""
        for each in (self, *others):
            each.in_pass = True
        loss.backward(**options)
        for each in (self, *others):
            each.in_pass = False
            for parameter, master in each.pairs:
                _add_to_master(master, parameter)

    def step(self) -> None:
        if self.clip is not None:
            self.clip([master for _, master in self.pairs])
            self.clip = None
        self.optimizer.step()
        self.steps += 1
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Writes the parameters that compute from their masters."""
        for parameter, master in self.pairs:
            if master is not parameter:
                parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter, master in self.pairs:
            parameter.grad = master.grad = None

    def toggle(self, others: Sequence[PlainOptimizer], on: bool) -> None:
        mine = {id(parameter) for parameter, _ in self.pairs}
        for other in others:
            for parameter, _ in other.pairs:
                if id(parameter) not in mine:
                    parameter.requires_grad_(not on)


def _add_to_master(master: Tensor, parameter: Tensor) -> None:
    """A backward pass has computed a gradient: it is added to the master's."""
    if parameter.grad is None or parameter is master:
        return
    gradient = parameter.grad.to(master.dtype)
    master.grad = gradient if master.grad is None else master.grad + gradient
    parameter.grad = None


@dataclasses.dataclass(frozen=True)
class PlainLoop:
    """A plain loop over a module made by `build`.

    Args:
        clip: max norm, or bound when `clip_by_value`.
        epochs: an epoch's last optimizer step takes what there is, as Lightning does.
        on_step: called with the number of the step and the masters by name after each optimizer step; it may edit them.
    """

    build: Callable[[], TrainModule]
    precision: str = "bf16-mixed"
    accumulate: int = 1
    clip: float | None = None
    clip_by_value: bool = False
    epochs: int = 1
    on_step: Callable[[int, dict[str, Tensor]], None] | None = None

    def run(self, batches: Batches) -> Outcome:
        """Trains on the batches in order; once, for all tests that ask for the same loop over the same batches."""
        with products_of(self.precision):
            if self.on_step is not None:
                return self.fresh(batches)
            once = _outcome(self, batches, torch.get_num_threads())
        return Outcome(list(once.losses), dict(once.weights))

    def fresh(self, batches: Batches) -> Outcome:
        """Trains on the batches in order, with products as they are computed where this is called."""
        torch.manual_seed(0)
        module = self.build()
        module.configure_model()
        module.train()
        dtype = DTYPES[self.precision]
        norms = [inner for inner in module.modules() if isinstance(inner, nn.modules.batchnorm._BatchNorm)]
        kept_whole = {id(parameter) for norm in norms for parameter in norm.parameters()}
        made = module.configure_optimizers()
        optimizers, schedule = _unpacked(made)
        shared: dict[int, Tensor] = {}
        plain = [PlainOptimizer(optimizer, self.precision, kept_whole, shared) for optimizer in optimizers]
        frozen = {name: p.detach().clone() for name, p in module.named_parameters()}
        self._cast_module(module, dtype, kept_whole)
        precise = {id(parameter): master for optimizer in plain for parameter, master in optimizer.pairs}
        masters = {name: precise.get(id(p), frozen[name]) for name, p in module.named_parameters()}
        if not module.automatic_optimization:
            _enable_manual_optimization(module, plain)
        for _ in range(self.epochs):
            for index, batch in enumerate(batches.items):
                batch = batch if self.precision.endswith("mixed") or dtype is torch.float32 else _cast(batch, dtype)
                with self._context(dtype):
                    loss = module.training_step(batch, index)
                if not module.automatic_optimization:
                    continue
                if index % self.accumulate == 0:
                    plain[0].zero_grad()
                if loss is not None:
                    plain[0].backward(loss / self.accumulate if self.accumulate > 1 else loss)
                if (index + 1) % self.accumulate == 0 or index + 1 == len(batches.items):
                    self._step(plain[0], masters)
                    if schedule is not None:
                        schedule.step()
        weights = {name: value.detach().clone() for name, value in masters.items()}
        weights |= {name: value.clone() for name, value in module.named_buffers()}
        return Outcome(module.losses, weights)

    def _step(self, optimizer: PlainOptimizer, masters: dict[str, Tensor]) -> None:
        optimizer.clip = self._clipping()
        optimizer.step()
        if self.on_step is not None:
            with torch.no_grad():
                self.on_step(optimizer.steps, masters)
            optimizer.publish()

    def _cast_module(self, module: nn.Module, dtype: torch.dtype, kept_whole: set[int]) -> None:
        if not self.precision.endswith("mixed"):
            module.to(dtype)
            return
        for parameter in module.parameters():
            if id(parameter) not in kept_whole:
                parameter.data = parameter.data.to(dtype)

    @contextmanager
    def _context(self, dtype: torch.dtype) -> Iterator[None]:
        if self.precision.endswith("mixed"):
            with torch.autocast("cpu", dtype):
                yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def _clipping(self) -> Callable[[list[Tensor]], object] | None:
        bound = self.clip
        if bound is None:
            return None
        if self.clip_by_value:
            return lambda masters: nn.utils.clip_grad_value_(masters, bound)
        return lambda masters: nn.utils.clip_grad_norm_(masters, bound)


@lru_cache(maxsize=64)
def _outcome(loop: PlainLoop, batches: Batches, threads: int) -> Outcome:
    """Kernels round differently with another number of threads."""
    return loop.fresh(batches)


def _unpacked(made: Any) -> tuple[list[Optimizer], Any]:
    if isinstance(made, Optimizer):
        return [made], None
    if isinstance(made, dict):
        return [made["optimizer"]], made["lr_scheduler"]["scheduler"]
    return list(made), None


def _enable_manual_optimization(module: Any, plain: list[PlainOptimizer]) -> None:
    """Gives a module outside a Trainer what manual optimization calls."""
    module.optimizers = lambda: plain if len(plain) > 1 else plain[0]
    module.manual_backward = lambda loss, **options: plain[0].backward(loss, plain[1:], **options)
    module.toggle_optimizer = lambda optimizer: optimizer.toggle(plain, True)
    module.untoggle_optimizer = lambda optimizer: optimizer.toggle(plain, False)

    def clip_gradients(optimizer: PlainOptimizer, gradient_clip_val: float, gradient_clip_algorithm: str) -> None:
        by_value = gradient_clip_algorithm == "value"
        (nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_)(
            [master for _, master in optimizer.pairs], gradient_clip_val
        )

    module.clip_gradients = clip_gradients


# -- the strategy's side ----------------------------------------------------------------------------------------------


def make_trainer(strategy: AngelPTMStrategy, precision: str = "bf16-mixed", **options: Any) -> L.Trainer:
    """A quiet Trainer on one CPU rank."""
    return quiet_trainer(strategy, precision=precision, **{"num_sanity_val_steps": 0, "max_epochs": 1, **options})


def outcome_of(module: TrainModule) -> Outcome:
    """After a fit: its losses, weights and buffers; weights must be ordinary tensors again."""
    weights = {}
    for name, parameter in module.named_parameters():
        assert parameter.is_contiguous() or parameter.numel() == 0, name
        assert parameter.untyped_storage().nbytes() >= parameter.numel() * parameter.itemsize, name
        weights[name] = parameter.detach().clone()
    weights |= {name: value.clone() for name, value in module.named_buffers()}
    return Outcome(module.losses, weights)


def fit(
    build: Callable[[], TrainModule],
    batches: Batches,
    strategy: AngelPTMStrategy,
    precision: str = "bf16-mixed",
    **options: Any,
) -> Outcome:
    """Trains a freshly built module with the strategy."""
    torch.manual_seed(0)
    module = build()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*`training_step` returned `None`.*")
        make_trainer(strategy, precision, **options).fit(module, batches.loader())
    return outcome_of(module)

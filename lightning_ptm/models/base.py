"""Base class of the language models: building on the meta device, the steps that a Trainer calls, and the optimizer.

Knows nothing of pages: any strategy trains these models.
I1: parameters exist only after `configure_model`, which builds once.
I2: every parameter is owned by a module of a type that `init_weights` handles, so initialising module by module, in any
    order, initialises the whole model.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ptm.errors import ConfigError
from lightning_ptm.models import kernels as kernel_choice
from lightning_ptm.models.kernels import KernelChoice, Kernels
from lightning_ptm.trainer.internals import data_module_of_call


class TokenLoss(Metric):
    """Mean loss per token, in nats: batches are weighted by their tokens. NaN stays NaN; without a batch it is NaN."""

    full_state_update = False
    nats: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        # float64, as a long evaluation adds small numbers to a large one.
        self.add_state("nats", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, mean_nats: Tensor, token_count: int) -> None:
        """Adds a batch: its mean loss (a scalar) and the number of tokens that it is the mean of."""
        self.nats += mean_nats.detach().double() * token_count
        self.tokens += token_count

    def compute(self) -> Tensor:
        """Returns the mean, float32."""
        return (self.nats / self.tokens).float()


class TokenPerplexity(TokenLoss):
    """Perplexity: exp of the mean loss per token."""

    def compute(self) -> Tensor:
        """Returns the perplexity, float32."""
        return super().compute().exp()


Batch = tuple[Tensor, Tensor]
"""Input tokens and target tokens of a batch, both of shape (batch, tokens) and of an integer dtype."""


@runtime_checkable
class DividesSequences(Protocol):
    """A strategy with which a rank may have only some tokens of each sequence."""

    @property
    def ranks_of_sequence(self) -> int:
        """Number of ranks that have the tokens of each sequence that is computed now."""

    def positions(self, length: int) -> Tensor:
        """Returns the positions of this rank's `length` tokens in their sequence."""


class LanguageModel(LightningModule):
    """Base class of a language model, with AdamW, a warm-up and a cosine of the learning rate.

    Logs `train_loss` (nats per token), and at the end of an evaluation `val_loss` and `val_perplexity` (`test_...` in a
    test), averaged over tokens and ranks. A subclass implements `build` (creates modules), `init_weights` (initialises them)
    and `loss`.

    Args:
        learning_rate: Peak learning rate, reached at the end of the warm-up.
        warmup_steps: Optimizer steps of linear warm-up.
        final_learning_rate_fraction: End of the cosine, as a fraction of the peak.
        betas: Betas of AdamW.
        weight_decay: Weight decay of AdamW, on matrices only; biases and norms have none.
        meta: Whether `configure_model` builds on the meta device, without memory. The strategy then materialises one unit at
            a time and fills it with `init_weights`. Under Lightning's strategies that put whole models on each device
            (single device, DDP) the model is built in memory all the same, as they materialise nothing.
        kernels: Kernels of norms and AdamW: `auto` takes the norms of NVIDIA Apex on CUDA if it is installed, and its AdamW
            if all parameters are on CUDA; `apex` takes both, and needs master weights on the GPU; `torch` takes torch's.

    Raises:
        ConfigError: a rate, a number of steps or a probability is out of range; in `setup`, the data module has more tokens
            or longer sequences than the model knows.
    """

    vocab_size: int | None = None
    """Number of tokens; None: unknown, and no data is refused for its tokens."""

    longest: int | None = None
    """Tokens of the longest sequence that the model can read; None: any."""

    def __init__(
        self,
        *,
        learning_rate: float,
        warmup_steps: int,
        final_learning_rate_fraction: float,
        betas: tuple[float, float],
        weight_decay: float,
        meta: bool,
        kernels: KernelChoice,
    ) -> None:
        super().__init__()
        if not learning_rate >= 0 or warmup_steps < 0 or not 0 <= final_learning_rate_fraction <= 1:
            raise ConfigError(
                f"{type(self).__name__} got learning_rate={learning_rate}, warmup_steps={warmup_steps}, "
                f"final_learning_rate_fraction={final_learning_rate_fraction}, with which the rate would be negative or rise "
                f"to its end; give 0 or more for the first two, and 0 to 1 for the third"
            )
        if not (all(0 <= beta < 1 for beta in betas) and weight_decay >= 0):
            raise ConfigError(
                f"{type(self).__name__} got betas={betas}, weight_decay={weight_decay}, with which AdamW cannot work; give "
                f"betas in [0, 1) and a weight_decay of 0 or more"
            )
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.final_learning_rate_fraction = final_learning_rate_fraction
        self.betas = betas
        self.weight_decay = weight_decay
        self.meta = meta
        self.kernels = kernels
        self.chosen: Kernels = kernel_choice.choose(kernels)
        self._built = False
        self.val_loss = TokenLoss()
        self.val_perplexity = TokenPerplexity()
        self.test_loss = TokenLoss()
        self.test_perplexity = TokenPerplexity()

    # ---- implemented by subclasses ----

    @abstractmethod
    def build(self) -> None:
        """Creates the modules that have parameters, on torch's default device."""

    @abstractmethod
    def init_weights(self, module: nn.Module) -> None:
        """Initialises, in place, the parameters that `module` itself owns (not those of its children)."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy of a batch, in nats per token."""

    def token_count(self, batch: Batch) -> int:
        """Returns the number of tokens that the loss of a batch is the mean of."""
        return batch[1].numel()

    # ---- building ----

    def configure_model(self) -> None:
        """Creates the parameters, once; Lightning calls this before each of fit, validate, test and predict."""
        if self._built:
            return
        strategy = None if self._trainer is None else self._trainer.strategy
        meta = self.meta and not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
        with torch.device("meta" if meta else torch.get_default_device()):
            self.build()
        self._built = True
        if not meta:
            self.apply(self.init_weights)

    def setup(self, stage: str) -> None:
        """Checks that the model knows the tokens and lengths of this run's data module.

        Compared are the data module's `tokens_used` (or else `vocab_size`) and `input_length`, if it has them.

        Raises:
            ConfigError: it does not know them; or there are no kernels of Apex, which `kernels` asks for.
        """
        kernel_choice.check(self.kernels, self.trainer.strategy.root_device)
        data = data_module_of_call(self.trainer)
        tokens = getattr(data, "tokens_used", getattr(data, "vocab_size", None))
        length = getattr(data, "input_length", None)
        name, other = type(self).__name__, type(data).__name__
        if isinstance(tokens, int) and self.vocab_size is not None and tokens > self.vocab_size:
            raise ConfigError(
                f"{other} uses {tokens} tokens and {name} knows {self.vocab_size}, so there is no vector for the others; "
                f"give the model vocab_size={tokens} or more (--model.init_args.vocab_size), or other data"
            )
        if isinstance(length, int) and self.longest is not None and length > self.longest:
            raise ConfigError(
                f"{other} gives sequences of {length} tokens and {name} reads {self.longest} at most, so there is no "
                f"position for the others; raise the model's sequence_length or lower the data's "
                f"(--model.init_args.sequence_length, --data.init_args.sequence_length)"
            )

    def on_fit_start(self) -> None:
        """Says whose kernels the model has, where there is a choice."""
        optimizer = next(iter(self.trainer.optimizers), None)
        said = kernel_choice.in_words(self.kernels, self, optimizer, self.trainer.strategy.root_device)
        if said:
            rank_zero_info(said)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Builds the model in memory in `load_from_checkpoint`, where no strategy materialises meta parameters."""
        if self.meta and self._trainer is None:
            self.meta = self._built = False
            self.configure_model()

    # ---- computing ----

    def _dividing(self) -> DividesSequences | None:
        strategy = None if self._trainer is None else self._trainer.strategy
        return strategy if isinstance(strategy, DividesSequences) else None

    def whole_length(self, tokens: Tensor) -> int:
        """Returns the length of the sequences of which `tokens`, (batch, tokens), are all, or this rank's (context
        parallelism)."""
        dividing = self._dividing()
        return tokens.shape[1] * (1 if dividing is None else dividing.ranks_of_sequence)

    def positions(self, tokens: Tensor) -> Tensor:
        """Returns the positions of `tokens`, (batch, tokens), in their sequences."""
        dividing = self._dividing()
        if dividing is None:
            return torch.arange(tokens.shape[1], device=tokens.device)
        return dividing.positions(tokens.shape[1]).to(tokens.device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the loss of one micro-batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds one batch to `val_loss` and `val_perplexity`."""
        loss, token_count = self.loss(batch), self.token_count(batch)
        self.val_loss.update(loss, token_count)
        self.val_perplexity.update(loss, token_count)
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_perplexity", self.val_perplexity)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds one batch to `test_loss` and `test_perplexity`."""
        loss, token_count = self.loss(batch), self.token_count(batch)
        self.test_loss.update(loss, token_count)
        self.test_perplexity.update(loss, token_count)
        self.log("test_loss", self.test_loss)
        self.log("test_perplexity", self.test_perplexity)

    # ---- optimizing ----

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Returns AdamW with two parameter groups (with and without decay), and a scheduler that runs at each step."""
        total_steps = self.trainer.estimated_stepping_batches
        if math.isinf(total_steps):
            raise ConfigError(
                "The Trainer has neither max_steps nor max_epochs, so the cosine of the learning rate has no end; "
                "set one of them"
            )
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = self.chosen.adamw(groups, lr=self.learning_rate, betas=self.betas)
        rate = functools.partial(
            warmup_cosine,
            warmup_steps=self.warmup_steps,
            total_steps=int(total_steps),
            final_fraction=self.final_learning_rate_fraction,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def check_heads(name: str, width: int, heads: int, head_width: int | None) -> None:
    """Raises a ConfigError if heads without a `head_width` would not be equally wide."""
    if head_width is None and width % heads:
        raise ConfigError(
            f"{name} got width={width} and heads={heads}: heads of equal width are impossible; "
            f"choose a width that is a multiple of {heads}, or a head_width"
        )


def check_dropout(name: str, dropout: float) -> None:
    """Raises a ConfigError if a dropout probability is not in [0, 1)."""
    if not 0 <= dropout < 1:
        raise ConfigError(
            f"{name} got dropout={dropout}, which is no probability, or would drop every activation; give a probability in "
            f"[0, 1)"
        )


def check_loss_tokens(name: str, loss_tokens: int | None) -> None:
    """Raises a ConfigError if a loss could compute no token."""
    if loss_tokens is not None and loss_tokens < 1:
        raise ConfigError(
            f"{name} got loss_tokens={loss_tokens}, with which no logits could be computed; give 1 or more, or None: as many "
            f"as have 256 MiB of logits"
        )


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, final_fraction: float) -> float:
    """Returns the learning rate of a step as a fraction of its peak: linear up, then half a cosine down to `final_fraction`.

    The first step is above 0 and step `warmup_steps` is the peak; from `total_steps` on it stays at `final_fraction`.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * progress))

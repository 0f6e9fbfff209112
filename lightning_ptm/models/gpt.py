"""A GPT: the model of the main job, of the examples and of the benchmarks.

Plain PyTorch with pre-norm blocks, learned positions and GPT-2's initialisation. It knows nothing of pages: any
strategy trains it. I1: parameters exist only after `configure_model`, which builds once. I2: every parameter is owned
by a module of a type that `init_weights` handles, so initialising module by module, in any order, does the whole model.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.models.metrics import TokenLoss, TokenPerplexity

INIT_STD = 0.02
"""Standard deviation of GPT-2's initial weights."""

Batch = tuple[Tensor, Tensor]
"""Tokens and the tokens that follow them, both of shape (batch, sequence) and of an integer dtype."""


class ResidualLinear(nn.Linear):
    """A linear layer that adds to the residual stream: two a block, whose sum must not grow with depth."""


class Attention(nn.Module):
    """Causal self-attention over (batch, sequence, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = ResidualLinear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        split = self.query_key_value(x).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, sequence, width / heads)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, sequence, width))


class FeedForward(nn.Module):
    """Two linear layers, four times as wide in between, with GELU in its tanh form as in GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.project = ResidualLinear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.gelu(self.expand(x), approximate="tanh"))


class Block(nn.Module):
    """One transformer block, normalised before each part: the unit in which the model is fetched and released."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT(LightningModule):
    """Predicts the next token; bytes by default, so that any text will do.

    Logs `train_loss` (nats per token), and at the end of an evaluation `val_loss` and `val_perplexity` (`test_...` in a
    test), averaged over tokens and ranks.

    Args:
        vocab_size: Number of tokens; 256 reads bytes.
        width: Elements of a token's vector, a multiple of `heads`.
        layers: Number of blocks.
        heads: Attention heads of a block.
        sequence_length: Longest sequence, in tokens.
        dropout: Probability in residual branches, attention weights and the embedding.
        tie_head: The output layer uses the token embedding's weight.
        learning_rate: Its peak, reached at the end of the warm-up.
        warmup_steps: Optimizer steps of linear warm-up.
        final_learning_rate_fraction: What the cosine ends at, as a fraction of the peak.
        betas: AdamW's.
        weight_decay: AdamW's, on matrices only: biases and norms have none.
        meta: `configure_model` builds on the meta device, without memory. The strategy then materialises one unit at a
            time and fills it with `init_weights`.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        width: int = 256,
        layers: int = 6,
        heads: int = 4,
        sequence_length: int = 256,
        dropout: float = 0.0,
        tie_head: bool = False,
        learning_rate: float = 1e-3,
        warmup_steps: int = 20,
        final_learning_rate_fraction: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        meta: bool = False,
    ) -> None:
        super().__init__()
        if min(vocab_size, width, layers, heads, sequence_length) < 1:
            raise ConfigError(
                f"GPT got vocab_size={vocab_size}, width={width}, layers={layers}, heads={heads}, "
                f"sequence_length={sequence_length}; none of them can be built from less than 1"
            )
        if width % heads:
            raise ConfigError(
                f"GPT got width={width} and heads={heads}: heads of equal width are impossible; "
                f"choose a width that is a multiple of {heads}"
            )
        self.save_hyperparameters()
        self.vocab_size = vocab_size
        self.width = width
        self.layers = layers
        self.heads = heads
        self.sequence_length = sequence_length
        self.dropout = dropout
        self.tie_head = tie_head
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.final_learning_rate_fraction = final_learning_rate_fraction
        self.betas = betas
        self.weight_decay = weight_decay
        self.meta = meta
        self._built = False
        self.val_loss = TokenLoss()
        self.val_perplexity = TokenPerplexity()
        self.test_loss = TokenLoss()
        self.test_perplexity = TokenPerplexity()

    # ---- building ----

    def configure_model(self) -> None:
        """Creates the parameters, once; Lightning calls this before each of fit, validate, test and predict."""
        if self._built:
            return
        with torch.device("meta" if self.meta else torch.get_default_device()):
            self.token_embedding = nn.Embedding(self.vocab_size, self.width)
            self.position_embedding = nn.Embedding(self.sequence_length, self.width)
            self.embedding_dropout = nn.Dropout(self.dropout)
            self.blocks = nn.ModuleList(Block(self.width, self.heads, self.dropout) for _ in range(self.layers))
            self.norm = nn.LayerNorm(self.width)
            self.head = nn.Linear(self.width, self.vocab_size, bias=False)
        if self.tie_head:
            self.head.weight = self.token_embedding.weight
        self._built = True
        if not self.meta:
            self.apply(self.init_weights)

    @torch.no_grad()
    def init_weights(self, module: nn.Module) -> None:
        """Initialises, in place, the parameters that `module` itself owns (not those of its children), as GPT-2 does.

        Weights are normal with a standard deviation of 0.02, divided by sqrt(2 * layers) in residual projections;
        biases are 0, norms 1 and 0. Draws from PyTorch's default generator.
        """
        if isinstance(module, nn.Linear):
            depth_scale = math.sqrt(2 * self.layers) if isinstance(module, ResidualLinear) else 1.0
            nn.init.normal_(module.weight, std=INIT_STD / depth_scale)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Builds meta parameters again, in memory, in `GPT.load_from_checkpoint`: no strategy is there to do it."""
        if self.meta and self._trainer is None:
            self.meta = self._built = False
            self.configure_model()

    # ---- sizes ----

    @property
    def parameter_numel(self) -> int:
        """Number of parameters, known before they exist; a tied weight counts once."""
        block = 12 * self.width**2 + 13 * self.width
        embeddings = (self.vocab_size + self.sequence_length) * self.width
        head = 0 if self.tie_head else self.vocab_size * self.width
        return embeddings + self.layers * block + 2 * self.width + head

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations that training spends on one token, without recomputation.

        6 per weight of a matrix multiplication (2 forward, 4 backward), and 12 * layers * width * sequence for
        attention (the count of PaLM, appendix B, which takes no advantage of the causal mask).
        """
        matrix_numel = self.layers * 12 * self.width**2 + self.vocab_size * self.width
        return 6 * matrix_numel + 12 * self.layers * self.width * self.sequence_length

    # ---- computing ----

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, sequence, vocab_size) for tokens of shape (batch, sequence)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding_dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of a batch, in nats per token."""
        tokens, targets = batch
        logits = self(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one micro-batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds one batch to `val_loss` and `val_perplexity`."""
        loss, token_count = self.loss(batch), batch[1].numel()
        self.val_loss.update(loss, token_count)
        self.val_perplexity.update(loss, token_count)
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_perplexity", self.val_perplexity)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds one batch to `test_loss` and `test_perplexity`."""
        loss, token_count = self.loss(batch), batch[1].numel()
        self.test_loss.update(loss, token_count)
        self.test_perplexity.update(loss, token_count)
        self.log("test_loss", self.test_loss)
        self.log("test_perplexity", self.test_perplexity)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross-entropy of each sequence, shape (batch,), in nats per token: how surprising the model finds it."""
        tokens, targets = batch
        losses = F.cross_entropy(self(tokens).float().transpose(1, 2), targets, reduction="none")
        return losses.mean(dim=1)

    # ---- optimizing ----

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW in two parameter groups (with and without decay), its rate set at each step."""
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
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas)
        rate = functools.partial(
            warmup_cosine,
            warmup_steps=self.warmup_steps,
            total_steps=int(total_steps),
            final_fraction=self.final_learning_rate_fraction,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, final_fraction: float) -> float:
    """Learning rate of a step as a fraction of its peak: linear up, then half a cosine down to `final_fraction`.

    The first step is above 0 and step `warmup_steps` is the peak; from `total_steps` on it stays at `final_fraction`.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * progress))

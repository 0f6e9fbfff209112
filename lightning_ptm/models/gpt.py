"""A GPT in plain PyTorch, for examples and benchmarks.

Pre-norm blocks, learned positions and GPT-2's initialisation. It knows nothing of pages: any strategy trains it. The
invariants are those of `base.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.models.base import Batch, LanguageModel, check_dropout, check_heads, check_loss_tokens
from lightning_ptm.models.kernels import TORCH, KernelChoice, Kernels, is_norm
from lightning_ptm.parallel import ColwiseParallel, RowwiseParallel, Rule, VocabParallel
from lightning_ptm.parallel.sliced_loss import sliced_cross_entropy

INIT_STD = 0.02
"""Standard deviation of GPT-2's initial weights."""


class ResidualLinear(nn.Linear):
    """Linear layer that adds to the residual stream; initialised smaller, so that the stream does not grow with depth."""


class Attention(nn.Module):
    """Causal self-attention over (batch, sequence, width)."""

    def __init__(self, width: int, heads: int, head_width: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * heads * head_width)
        self.project = ResidualLinear(heads * head_width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        split = self.query_key_value(x).view(batch, sequence, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, sequence, head_width)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Feed-forward of two linear layers, with GELU in its tanh form as in GPT-2."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, inner)
        self.project = ResidualLinear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.gelu(self.expand(x), approximate="tanh"))


class Block(nn.Module):
    """Pre-norm transformer block: the unit in which the model is fetched and released."""

    def __init__(
        self, width: int, heads: int, head_width: int, inner: int, dropout: float, kernels: Kernels = TORCH
    ) -> None:
        super().__init__()
        self.attention_norm = kernels.layer_norm(width)
        self.attention = Attention(width, heads, head_width, dropout)
        self.feed_forward_norm = kernels.layer_norm(width)
        self.feed_forward = FeedForward(width, inner)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT(LanguageModel):
    """GPT that predicts the next token; tokens are bytes by default, so that it reads any text.

    A batch is tokens and the tokens that follow them. `LanguageModel` describes what is logged.

    Args:
        vocab_size: Number of tokens; 256 reads bytes.
        width: Elements of a token's vector, a multiple of `heads` unless `head_width` is given.
        layers: Number of blocks.
        heads: Attention heads of a block.
        head_width: Elements of a head's vectors; by default `width / heads`.
        feed_forward_width: Elements between the two layers of a feed-forward; by default `4 * width`.
        sequence_length: Longest sequence, in tokens.
        dropout: Probability in residual branches, attention weights and the embedding.
        tie_head: Whether the output layer uses the token embedding's weight.
        loss_tokens: Tokens whose logits are in memory at once in a loss; by default as many as have 256 MiB of logits, but at
            least 384. With fewer than the batch has, losses stay as they are up to the rounding of matrix products.
        learning_rate: Peak learning rate, reached at the end of the warm-up.
        warmup_steps: Optimizer steps of linear warm-up.
        final_learning_rate_fraction: End of the cosine, as a fraction of the peak.
        betas: Betas of AdamW.
        weight_decay: Weight decay of AdamW, on matrices only; biases and norms have none.
        meta: Whether `configure_model` builds on the meta device, without memory. The strategy then materialises one unit at
            a time and fills it with `init_weights`.
        kernels: Kernels of norms and AdamW: `auto`, `torch` or `apex`; see `LanguageModel`.

    Raises:
        ConfigError: sizes do not fit together.
    """

    vocab_size: int
    tensor_parallel_plan: ClassVar[Mapping[str, Rule]] = {
        "blocks.*.attention.query_key_value": ColwiseParallel(parts=3, heads="heads"),
        "blocks.*.attention.project": RowwiseParallel(),
        "blocks.*.feed_forward.expand": ColwiseParallel(),
        "blocks.*.feed_forward.project": RowwiseParallel(),
        "token_embedding": VocabParallel(),
        "head": ColwiseParallel(gather=True),
    }

    def __init__(
        self,
        vocab_size: int = 256,
        width: int = 256,
        layers: int = 6,
        heads: int = 4,
        head_width: int | None = None,
        feed_forward_width: int | None = None,
        sequence_length: int = 256,
        dropout: float = 0.0,
        tie_head: bool = False,
        loss_tokens: int | None = None,
        learning_rate: float = 1e-3,
        warmup_steps: int = 20,
        final_learning_rate_fraction: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        meta: bool = False,
        kernels: KernelChoice = "auto",
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            final_learning_rate_fraction=final_learning_rate_fraction,
            betas=betas,
            weight_decay=weight_decay,
            meta=meta,
            kernels=kernels,
        )
        if min(vocab_size, width, layers, heads, sequence_length) < 1:
            raise ConfigError(
                f"GPT got vocab_size={vocab_size}, width={width}, layers={layers}, heads={heads}, "
                f"sequence_length={sequence_length}; give each as at least 1"
            )
        check_dropout("GPT", dropout)
        check_loss_tokens("GPT", loss_tokens)
        if min(head_width or 1, feed_forward_width or 1) < 1:
            raise ConfigError(
                f"GPT got head_width={head_width}, feed_forward_width={feed_forward_width}; both must be at least 1"
            )
        check_heads("GPT", width, heads, head_width)
        self.save_hyperparameters()
        self.vocab_size = vocab_size
        self.width = width
        self.layers = layers
        self.heads = heads
        self.head_width = head_width or width // heads
        self.feed_forward_width = feed_forward_width or 4 * width
        self.sequence_length = self.longest = sequence_length
        self.dropout = dropout
        self.tie_head = tie_head
        self.loss_tokens = loss_tokens

    # ---- building ----

    def build(self) -> None:
        """Creates the modules that have parameters, on torch's default device."""
        self.token_embedding = nn.Embedding(self.vocab_size, self.width)
        self.position_embedding = nn.Embedding(self.sequence_length, self.width)
        self.embedding_dropout = nn.Dropout(self.dropout)
        shape = (self.width, self.heads, self.head_width, self.feed_forward_width, self.dropout)
        self.blocks = nn.ModuleList(Block(*shape, self.chosen) for _ in range(self.layers))
        self.norm = self.chosen.layer_norm(self.width)
        self.head = nn.Linear(self.width, self.vocab_size, bias=False)
        if self.tie_head:
            self.head.weight = self.token_embedding.weight

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
        elif is_norm(module):
            nn.init.ones_(module.weight)  # type: ignore[arg-type]
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    # ---- sizes ----

    @property
    def parameter_numel(self) -> int:
        """Number of parameters, computed from the sizes; a tied weight counts once."""
        attention = self.heads * self.head_width
        biases_and_norms = 3 * attention + self.feed_forward_width + 6 * self.width
        block = self._block_matrix_numel + biases_and_norms
        embeddings = (self.vocab_size + self.sequence_length) * self.width
        head = 0 if self.tie_head else self.vocab_size * self.width
        return embeddings + self.layers * block + 2 * self.width + head

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations that training spends on one token, without recomputation.

        6 per weight of a matrix multiplication (2 forward, 4 backward), and 12 * layers * heads * head_width * sequence
        for attention (the count of PaLM, appendix B, which takes no advantage of the causal mask).
        """
        matrix_numel = self.layers * self._block_matrix_numel + self.vocab_size * self.width
        return 6 * matrix_numel + 12 * self.layers * self.heads * self.head_width * self.sequence_length

    @property
    def _block_matrix_numel(self) -> int:
        return (4 * self.heads * self.head_width + 2 * self.feed_forward_width) * self.width

    # ---- computing ----

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits of shape (batch, sequence, vocab_size) for tokens of shape (batch, sequence).

        Raises:
            UsageError: the sequences are longer than `sequence_length`.
        """
        logits: Tensor = self.head(self.hidden(tokens))
        return logits

    def hidden(self, tokens: Tensor) -> Tensor:
        """Returns the head's inputs, (batch, sequence, width); raises as `forward` does."""
        whole = self.whole_length(tokens)
        if whole > self.sequence_length:
            raise UsageError(
                f"GPT got sequences of {whole} tokens and has positions for {self.sequence_length}, so it cannot "
                f"read the others; cut the sequences, or build it with a longer sequence_length"
            )
        positions = self.positions(tokens)
        x = self.embedding_dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out

    def loss(self, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy of a batch, in nats per token."""
        tokens, targets = batch
        return sliced_cross_entropy(self.head, self.hidden(tokens), targets, tokens=self.loss_tokens)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the cross-entropy of each sequence, shape (batch,), in nats per token."""
        tokens, targets = batch
        losses = sliced_cross_entropy(
            self.head, self.hidden(tokens), targets, tokens=self.loss_tokens, reduction="none"
        )
        return losses.mean(dim=1)

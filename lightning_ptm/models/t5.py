"""T5 in plain PyTorch: an encoder and a decoder for text-to-text tasks (Raffel et al. 2020).

As in version 1.0 of T5: RMS norms before each part, relative position biases shared by the blocks of a stack, no biases in
linear layers, attention without scaling, the head tied to the embedding and its logits scaled by 1/sqrt(width), and Mesh
TensorFlow's initialisation. It knows nothing of pages: any strategy trains it. The invariants are those of `base.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.models.base import Batch, LanguageModel, check_dropout, check_heads, check_loss_tokens
from lightning_ptm.models.kernels import TORCH, KernelChoice, Kernels, is_norm
from lightning_ptm.models.moe import MixtureOfExperts, Routing
from lightning_ptm.parallel import ColwiseParallel, Part, RowwiseParallel, Rule, VocabParallel
from lightning_ptm.parallel.sliced_loss import sliced_cross_entropy

NORM_EPS = 1e-6
PAD = 0
"""Token before the first target; targets that are this token do not count in the loss."""


class QueryLinear(nn.Linear):
    """Linear layer of queries: its smaller initial weights replace attention's scaling."""


class BucketEmbedding(nn.Embedding):
    """Embedding of distance buckets: one number per head and bucket."""


class TiedHead(nn.Linear):
    """Output layer whose weight is the token embedding's; it is initialised there."""


class RelativePosition(nn.Module):
    """Relative position bias: numbers added to attention scores, by the distance from query to key.

    The first half of the buckets are exact distances, the others grow logarithmically up to `max_distance`.

    Args:
        heads: attention heads, each with its own numbers.
        buckets: number of distance buckets; with `bidirectional`, half of them are for keys after the query.
        max_distance: distance from which on all distances share a bucket.
        bidirectional: whether keys may come after queries (an encoder).
    """

    def __init__(self, heads: int, buckets: int, max_distance: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.buckets = buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.embedding = BucketEmbedding(buckets, heads)

    def bucket(self, distance: Tensor) -> Tensor:
        """Returns the bucket of each `distance` (the key's position minus the query's)."""
        buckets = self.buckets
        first = torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            first = (distance > 0).long() * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        # In float32 as in T5's own code: another precision would put some distances into another bucket.
        logarithm = torch.log(distance.float().clamp(min=1) / exact) / math.log(self.max_distance / exact)
        far = (exact + (logarithm * (buckets - exact)).long()).clamp(max=buckets - 1)
        return first + torch.where(distance < exact, distance, far)

    def forward(self, length: int, device: torch.device) -> Tensor:
        """Returns the bias, (1, heads, length, length)."""
        position = torch.arange(length, device=device)
        bias: Tensor = self.embedding(self.bucket(position[None, :] - position[:, None]))
        return bias.permute(2, 0, 1).unsqueeze(0)


class Attention(nn.Module):
    """Attention of `x`, (batch, queries, width), over `source`, (batch, keys, width); for self-attention they are equal."""

    def __init__(self, width: int, heads: int, head_width: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query = QueryLinear(width, heads * head_width, bias=False)
        self.key_value = nn.Linear(width, 2 * heads * head_width, bias=False)
        self.project = nn.Linear(heads * head_width, width, bias=False)
        self.bias_of_heads = nn.Identity()
        """Takes this rank's heads of the bias under tensor parallelism; the plan has a rule for it."""

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the attention's output.

        Args:
            bias: added to the scores, (1 or batch, 1 or heads, 1 or queries, keys).
        """
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        split = self.key_value(source).unflatten(-1, (2, self.heads, -1))
        key, value = split.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, keys, head_width)
        dropout = self.dropout if self.training else 0.0
        mask = None if bias is None else self.bias_of_heads(bias).to(query.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=1.0)
        out: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Feed-forward of two linear layers, with ReLU or, if `gated`, the gated GELU of T5 1.1."""

    def __init__(self, width: int, inner: int, *, gated: bool, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(width, inner, bias=False)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None
        self.dropout = nn.Dropout(dropout)
        self.project = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.expand(x)
        inner = F.relu(inner) if self.gate is None else F.gelu(self.gate(x), approximate="tanh") * inner
        out: Tensor = self.project(self.dropout(inner))
        return out


class Block(nn.Module):
    """Block of the encoder or, with attention over the encoder's output, of the decoder: a unit.

    `feed_forward` is a FeedForward or a MixtureOfExperts.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        feed_forward: nn.Module,
        dropout: float,
        kernels: Kernels = TORCH,
        *,
        decoder: bool,
    ) -> None:
        super().__init__()
        self.attention_norm = kernels.rms_norm(width, NORM_EPS)
        self.attention = Attention(width, heads, head_width, dropout)
        self.cross_norm = kernels.rms_norm(width, NORM_EPS) if decoder else None
        self.cross_attention = Attention(width, heads, head_width, dropout) if decoder else None
        self.feed_forward_norm = kernels.rms_norm(width, NORM_EPS)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, bias: Tensor, source: Tensor | None = None, source_bias: Tensor | None = None
    ) -> tuple[Tensor, Routing | None]:
        """Returns the new `x`, and the router's statistics if there is a router.

        Args:
            x: (batch, tokens, width).
            bias: added to the scores of self-attention.
            source: the encoder's output, for a block of the decoder.
            source_bias: added to the scores of attention over `source`.
        """
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, bias))
        if self.cross_attention is not None and self.cross_norm is not None:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), source, source_bias))
        normed = self.feed_forward_norm(x)
        if isinstance(self.feed_forward, MixtureOfExperts):
            out, routing = self.feed_forward(normed)
            return x + self.dropout(out), routing
        return x + self.dropout(self.feed_forward(normed)), None


class Stack(nn.Module):
    """Encoder or decoder: blocks that share one relative position bias, and a last norm."""

    def __init__(
        self, blocks: list[Block], position: RelativePosition, width: int, dropout: float, kernels: Kernels
    ) -> None:
        super().__init__()
        self.position = position
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(blocks)
        self.norm = kernels.rms_norm(width, NORM_EPS)

    def forward(
        self, x: Tensor, mask: Tensor | None, source: Tensor | None = None, source_mask: Tensor | None = None
    ) -> tuple[Tensor, list[Routing]]:
        """Returns the output of the last norm, and the statistics of each router.

        Args:
            x: embedded tokens, (batch, tokens, width).
            mask: 0 for keys that a query may attend to and -inf for others, (1 or batch, 1, 1 or tokens, tokens).
            source, source_mask: the encoder's output and the mask of its tokens, for a decoder.
        """
        bias = self.position(x.shape[1], x.device)
        if mask is not None:
            bias = bias + mask.to(bias.dtype)
        x = self.dropout(x)
        routings = []
        for block in self.blocks:
            x, routing = block(x, bias, source, source_mask)
            if routing is not None:
                routings.append(routing)
        return self.dropout(self.norm(x)), routings


def _attention_plan(name: str) -> dict[str, Rule]:
    return {
        f"{name}.query": ColwiseParallel(heads="heads"),
        f"{name}.key_value": ColwiseParallel(parts=2),
        f"{name}.project": RowwiseParallel(),
        # Position biases are computed whole and cut here: blocks take whole inputs, and there are few biases.
        f"{name}.bias_of_heads": Part(1),
    }


class T5(LanguageModel):
    """T5 for text-to-text tasks; `lightning_ptm.data.SpanCorruption` makes such a task from any text.

    A batch is (tokens, targets), whose lengths may differ. Token 0 is padding: it does not count in the loss, and the decoder
    starts from it. `LanguageModel` describes what is logged.

    Args:
        vocab_size: Number of tokens; the default is enough for SpanCorruption's bytes, two marks and 100 sentinels.
        width: Elements of a token's vector, a multiple of `heads` unless `head_width` is given.
        layers: Number of blocks of the encoder, and of the decoder.
        heads: Attention heads of a block.
        head_width: Elements of a head's vectors; by default `width / heads`.
        feed_forward_width: Elements between the two layers of a feed-forward; by default `4 * width`.
        gated: Whether feed-forwards have the gated GELU of T5 1.1 instead of ReLU.
        dropout: Probability in residual branches, attention weights, feed-forwards and at both ends of a stack.
        buckets: Number of buckets of relative positions.
        max_distance: Distance from which on all relative positions share a bucket.
        loss_tokens: Targets whose logits are in memory at once in a loss; see `GPT`.
        learning_rate, warmup_steps, final_learning_rate_fraction, betas, weight_decay, meta, kernels: See `LanguageModel`.

    Raises:
        ConfigError: sizes do not fit together.
    """

    vocab_size: int
    tensor_parallel_plan: ClassVar[Mapping[str, Rule]] = {
        **_attention_plan("*.blocks.*.attention"),
        **_attention_plan("*.blocks.*.cross_attention"),
        "*.blocks.*.feed_forward.expand": ColwiseParallel(),
        "*.blocks.*.feed_forward.gate": ColwiseParallel(),
        "*.blocks.*.feed_forward.project": RowwiseParallel(),
        "embedding": VocabParallel(),
        "head": ColwiseParallel(gather=True),
    }

    def __init__(
        self,
        vocab_size: int = 384,
        width: int = 256,
        layers: int = 3,
        heads: int = 4,
        head_width: int | None = None,
        feed_forward_width: int | None = None,
        gated: bool = False,
        dropout: float = 0.0,
        buckets: int = 32,
        max_distance: int = 128,
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
        name = type(self).__name__
        if min(vocab_size, width, layers, heads, head_width or 1, feed_forward_width or 1) < 1:
            raise ConfigError(
                f"{name} got vocab_size={vocab_size}, width={width}, layers={layers}, heads={heads}, "
                f"head_width={head_width}, feed_forward_width={feed_forward_width}; give each as at least "
                f"1"
            )
        check_dropout(name, dropout)
        check_loss_tokens(name, loss_tokens)
        check_heads(name, width, heads, head_width)
        if buckets < 4 or buckets % 4 or max_distance <= buckets // 2:
            raise ConfigError(
                f"{name} got buckets={buckets} and max_distance={max_distance}: a quarter of the buckets are exact distances "
                f"to each side and the others reach up to max_distance; choose a multiple of 4, and a distance above half of "
                f"it"
            )
        self.save_hyperparameters()
        self.vocab_size = vocab_size
        self.width = width
        self.layers = layers
        self.heads = heads
        self.head_width = head_width or width // heads
        self.feed_forward_width = feed_forward_width or 4 * width
        self.gated = gated
        self.dropout = dropout
        self.buckets = buckets
        self.max_distance = max_distance
        self.loss_tokens = loss_tokens

    # ---- building ----

    def build(self) -> None:
        """Creates the modules that have parameters, on torch's default device."""
        self.embedding = nn.Embedding(self.vocab_size, self.width)
        self.encoder = self._stack(decoder=False)
        self.decoder = self._stack(decoder=True)
        self.head = TiedHead(self.width, self.vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def _stack(self, *, decoder: bool) -> Stack:
        shape = (self.width, self.heads, self.head_width)
        blocks = [
            Block(*shape, self.make_feed_forward(index), self.dropout, self.chosen, decoder=decoder)
            for index in range(self.layers)
        ]
        position = RelativePosition(self.heads, self.buckets, self.max_distance, bidirectional=not decoder)
        return Stack(blocks, position, self.width, self.dropout, self.chosen)

    def make_feed_forward(self, index: int) -> nn.Module:
        """Returns the feed-forward of block `index` of either stack."""
        return FeedForward(self.width, self.feed_forward_width, gated=self.gated, dropout=self.dropout)

    @torch.no_grad()
    def init_weights(self, module: nn.Module) -> None:
        """Initialises, in place, the parameters that `module` itself owns (not those of its children), as T5 does.

        Weights are normal with a standard deviation of 1/sqrt(inputs), queries' divided by sqrt(head_width) since scores
        are not scaled; embeddings have 1, norms are 1. Draws from PyTorch's default generator.
        """
        if isinstance(module, TiedHead):
            return
        if isinstance(module, nn.Linear):
            inputs = module.in_features * (self.head_width if isinstance(module, QueryLinear) else 1)
            self.init_matrix(module.weight, inputs)
        elif isinstance(module, BucketEmbedding):
            self.init_matrix(module.weight, self.width)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0)
        elif is_norm(module):
            nn.init.ones_(module.weight)  # type: ignore[arg-type]

    def init_matrix(self, weight: Tensor, inputs: int) -> None:
        """Initialises in place a matrix whose outputs are sums of `inputs` terms."""
        nn.init.normal_(weight, std=inputs**-0.5)

    # ---- computing ----

    def forward(self, tokens: Tensor, previous: Tensor, padding: Tensor | None = None) -> Tensor:
        """Returns logits of shape (batch, targets, vocab_size).

        Args:
            tokens: the encoder's input, (batch, tokens).
            previous: for each target the one before it, (batch, targets); token 0 for the first.
            padding: (batch, tokens), True for padding in `tokens`; by default there is none.
        """
        logits: Tensor = self.head(self.hidden(tokens, previous, padding)[0])
        return logits

    def hidden(self, tokens: Tensor, previous: Tensor, padding: Tensor | None = None) -> tuple[Tensor, list[Routing]]:
        """Returns the head's inputs, (batch, targets, width), and the statistics of each router."""
        mask = None
        if padding is not None:
            mask = torch.zeros(padding.shape, device=padding.device).masked_fill(padding, -math.inf)[:, None, None, :]
        length = previous.shape[1]
        causal = torch.full((length, length), -math.inf, device=previous.device).triu(1)
        source, encoder_routings = self.encoder(self.embedding(tokens), mask)
        x, decoder_routings = self.decoder(self.embedding(previous), causal[None, None], source, mask)
        return x * self.width**-0.5, encoder_routings + decoder_routings

    def loss(self, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy of a batch, in nats per target."""
        return self.loss_and_routings(batch)[0]

    def loss_and_routings(self, batch: Batch) -> tuple[Tensor, list[Routing]]:
        """Returns the loss as `loss` does, and the statistics of each router."""
        tokens, targets = batch
        x, routings = self.hidden(tokens, shifted(targets))
        return sliced_cross_entropy(self.head, x, targets, tokens=self.loss_tokens, ignore_index=PAD), routings

    def token_count(self, batch: Batch) -> int:
        """Returns the number of targets that are not padding."""
        return int((batch[1] != PAD).sum())

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the cross-entropy of each sequence, shape (batch,), in nats per target."""
        tokens, targets = batch
        x, _ = self.hidden(tokens, shifted(targets))
        losses = sliced_cross_entropy(
            self.head, x, targets, tokens=self.loss_tokens, reduction="none", ignore_index=PAD
        )
        return losses.sum(dim=1) / (targets != PAD).sum(dim=1)


def shifted(targets: Tensor) -> Tensor:
    """Returns for each target the one before it; padding for the first."""
    return F.pad(targets[:, :-1], (1, 0), value=PAD)

"""Span corruption, the objective of T5 (Raffel et al. 2020, section 3.1.4), on the bytes of any text.

Short spans of a window are removed, and a sentinel replaces each. The target is each removed span after its sentinel, then a
last sentinel. The number of spans and of removed bytes is fixed, only the places are random, so that all samples are equally
long and none is padded. I1: each byte of a window is in its input or in its target, once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ptm.data.text import Samples, TextBytes
from lightning_ptm.errors import ConfigError

PAD, END, FIRST_BYTE = 0, 1, 2
FIRST_SENTINEL = FIRST_BYTE + 256
"""Tokens: padding, the end of an input or target, 256 bytes, then sentinels."""


def random_parts(total: int, parts: int, generator: torch.Generator | None) -> Tensor:
    """Returns random lengths of 1 or more that add up to `total`, (parts,); all such divisions are equally likely."""
    cuts = torch.randperm(total - 1, generator=generator)[: parts - 1].sort().values + 1
    return torch.diff(cuts, prepend=torch.zeros(1, dtype=torch.long), append=torch.tensor([total]))


def corrupt(text: Tensor, noise: int, spans: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Returns the input tokens and the targets of a window, int64.

    Kept and removed stretches of the text alternate, beginning with a kept one, so the input ends in a sentinel.

    Args:
        text: bytes, (length,).
        noise: number of bytes to remove.
        spans: number of removed spans; at least 1, at most `noise` and the number of kept bytes.

    Returns:
        (length - noise + spans + 1,) and (noise + spans + 2,), each with its end mark.
    """
    length = text.numel()
    kept = random_parts(length - noise, spans, generator)
    taken = random_parts(noise, spans, generator)
    tokens = text.long() + FIRST_BYTE
    sentinels = FIRST_SENTINEL + torch.arange(spans + 1)
    end = torch.tensor([END])
    is_taken = torch.repeat_interleave(
        torch.arange(2 * spans) % 2 == 1, torch.stack([kept, taken], dim=1).flatten(), output_size=length
    )
    # A sentinel follows each kept stretch of the input, and precedes each removed stretch of the target.
    given = _with_marks(tokens[~is_taken], kept.cumsum(0), sentinels[:-1])
    wanted = _with_marks(tokens[is_taken], taken.cumsum(0) - taken, sentinels[:-1])
    return torch.cat([given, end]), torch.cat([wanted, sentinels[-1:], end])


def _with_marks(tokens: Tensor, positions: Tensor, marks: Tensor) -> Tensor:
    """Returns `tokens` with the k-th of `marks` inserted at the k-th of `positions` (ascending)."""
    out = torch.empty(tokens.numel() + marks.numel(), dtype=torch.long)
    places = positions + torch.arange(marks.numel())
    is_mark = torch.zeros(out.numel(), dtype=torch.bool)
    is_mark[places] = True
    out[places] = marks
    out[~is_mark] = tokens
    return out


class CorruptedWindows(Samples):
    """Successive windows of a text, each with spans removed.

    Args:
        text: uint8, 1-D, not copied.
        sequence_length: bytes of a window.
        noise, spans: as in `corrupt`.
        fixed: whether a window is corrupted in the same places each time (evaluation); otherwise the places are drawn each
            time from torch's default generator.
    """

    def __init__(self, text: Tensor, sequence_length: int, noise: int, spans: int, *, fixed: bool) -> None:
        self.text = text
        self.sequence_length = sequence_length
        self.noise = noise
        self.spans = spans
        self.fixed = fixed

    def __len__(self) -> int:
        return self.text.numel() // self.sequence_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        # Plus the index, as the ranks' default generators are alike and would corrupt alike.
        seed = index if self.fixed else int(torch.randint(2**48, ())) + index
        start = index * self.sequence_length
        window = self.text[start : start + self.sequence_length]
        return corrupt(window, self.noise, self.spans, torch.Generator().manual_seed(seed))


class SpanCorruption(TextBytes):
    """Text for T5: windows of bytes with spans removed; the targets are the removed spans.

    Tokens: 0 is padding (unused here), 1 the end mark, 2 to 257 are bytes, sentinels follow.

    Args:
        noise_density: Fraction of the bytes that is removed.
        mean_span: Mean length of a span, in bytes.
        sentinels: Number of sentinel tokens, at least one more than there are spans.
        path, suffixes, sequence_length, batch_size, validation_fraction, num_workers: See TextBytes; the length is
            that of a window before corruption.

    Raises:
        ConfigError: noise_density is not between 0 and 1, mean_span is below 1, a window has fewer than 2 bytes, or there
            are too few sentinels for its spans; otherwise as TextBytes.
    """

    loss_unit = "nats/target token"

    def __init__(
        self,
        path: str | None = None,
        suffixes: Sequence[str] = (".py", ".txt", ".md", ".rst"),
        sequence_length: int = 256,
        batch_size: int = 16,
        validation_fraction: float = 0.05,
        num_workers: int = 0,
        noise_density: float = 0.15,
        mean_span: float = 3.0,
        sentinels: int = 100,
    ) -> None:
        super().__init__(path, suffixes, sequence_length, batch_size, validation_fraction, num_workers)
        if not 0.0 < noise_density < 1.0 or mean_span < 1.0 or sequence_length < 2:
            raise ConfigError(
                f"SpanCorruption got noise_density={noise_density}, mean_span={mean_span}, "
                f"sequence_length={sequence_length}, with which no span can be removed; give a noise_density between 0 and "
                f"1, a mean_span of 1 or more and a sequence_length of 2 or more"
            )
        self.noise = min(max(round(sequence_length * noise_density), 1), sequence_length - 1)
        self.spans = min(max(round(self.noise / mean_span), 1), sequence_length - self.noise)
        self.vocab_size = FIRST_SENTINEL + sentinels
        if self.spans + 1 > sentinels:
            raise ConfigError(
                f"SpanCorruption removes {self.spans} spans from {sequence_length} bytes, which needs {self.spans + 1} "
                f"sentinels, and there are {sentinels}; raise sentinels (and the model's vocab_size) or mean_span"
            )
        self.save_hyperparameters()

    @functools.cached_property
    def tokens_used(self) -> int:
        """Number of tokens up to the last sentinel of a target; `vocab_size` counts all sentinels."""
        return FIRST_SENTINEL + self.spans + 1

    @functools.cached_property
    def input_length(self) -> int:
        """Number of input tokens of a sample."""
        return self.sequence_length - self.noise + self.spans + 1

    @property
    def target_length(self) -> int:
        """Number of target tokens of a sample."""
        return self.noise + self.spans + 2

    @property
    def unigram_loss(self) -> float:
        """Validation loss, in nats per target token, of a model that knows only the frequency of each token.

        Each sentinel and the end mark occur once in every target. A model that has learnt anything has a lower loss.
        """
        byte_part = self.noise / self.target_length
        byte_nats = super().unigram_loss - math.log(byte_part)
        return byte_part * byte_nats + (1 - byte_part) * math.log(self.target_length)

    def windows(self, text: Tensor, *, training: bool) -> CorruptedWindows:
        """Returns corrupted windows of a text; for an evaluation they are the same each time."""
        return CorruptedWindows(text, self.sequence_length, self.noise, self.spans, fixed=not training)

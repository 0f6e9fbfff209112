"""Which token follows: the highest logit, or a draw. Plain functions of logits; knows no model.

I1: what is drawn depends on the logits, the settings and the seed alone, not on the device: draws are made on the CPU.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from lightning_ptm.errors import ConfigError, UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How a text is continued.

    Args:
        max_new_tokens: Tokens to add, at most.
        temperature: Logits are divided by it before a token is drawn; 0 takes the highest one, without a draw.
        top_k: Draw from the so many highest logits; None: from all.
        seed: Of the draws; the same seed gives the same text.
        stop: A token after which a text ends; None: none. Where several texts are continued at once, those that have ended
            go on with this token until all have.

    Raises:
        ConfigError: a number that makes no sense.
    """

    max_new_tokens: int = 100
    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}, so nothing would be added; give 1 or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"temperature is {self.temperature}; give 0 for the likeliest token, 1 for the model's own probabilities, or "
                f"another number from 0 up"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}, so there is no token to draw; give 1 or more, or leave it out")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed is {self.seed}; give a number from 0 to 2 ** 63 - 1")


class Sampler:
    """Draws of one text after another token, from the seed on.

    Args:
        sampling: how.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> Tensor:
        """The next tokens, int64 of shape (texts,) on the CPU, for logits of shape (texts, vocabulary) on any device.

        Raises:
            UsageError: logits are NaN or infinite.
        """
        logits = logits.detach().cpu().double()
        if not torch.isfinite(logits).all():
            raise UsageError(
                "the model's logits are NaN or infinite, so no token follows from them; its weights are damaged or have "
                "diverged in training: use an earlier checkpoint, or more precision"
            )
        if self._sampling.temperature == 0:
            return logits.argmax(-1)
        count = min(self._sampling.top_k or logits.shape[-1], logits.shape[-1])
        values, tokens = logits.topk(count)
        # The highest is subtracted first: a quotient by a small temperature could be infinite otherwise.
        odds = ((values - values[:, :1]) / self._sampling.temperature).softmax(-1)
        return tokens.gather(1, torch.multinomial(odds, 1, generator=self._generator))[:, 0]

"""Dynamic loss scale for float16 gradients: the rules of torch.amp.GradScaler, without its per-tensor work.

Owns the scale and the growth counter. norms.py finds out whether gradients are finite; the ranks agree on the result before
they pass it to `update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_ptm.errors import ConfigError


class LossScale:
    """Loss scale that grows after `growth_interval` steps without overflow and shrinks at each overflow.

    Args:
        init_scale: scale of the first step.
        growth_factor: factor after `growth_interval` finite steps in a row; above 1.
        backoff_factor: factor at a step with inf or NaN; between 0 and 1.
        growth_interval: steps.

    Raises:
        ConfigError: a factor or the interval is out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if growth_factor <= 1.0 or not 0.0 < backoff_factor < 1.0 or growth_interval < 1 or init_scale <= 0.0:
            raise ConfigError(
                f"loss scale with init_scale={init_scale}, growth_factor={growth_factor}, "
                f"backoff_factor={backoff_factor}, growth_interval={growth_interval} can neither grow nor shrink; take "
                "growth_factor above 1, backoff_factor between 0 and 1, growth_interval of at least 1 and init_scale above 0"
            )
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval

        self._scale = float(init_scale)
        self._growth_tracker = 0

    @property
    def value(self) -> float:
        """The scale of the current step."""
        return self._scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the scaled loss, on which to call `backward`."""
        return loss * self._scale

    def unscale_factor(self) -> torch.Tensor:
        """Returns the 0-dim float32 factor that undoes the scale, for `Transform.unscale`."""
        return torch.tensor(self._scale, dtype=torch.float64).reciprocal().float()

    def update(self, found_inf: bool) -> None:
        """Ends a step: `found_inf` says whether any rank's gradients had inf or NaN (the step was then skipped)."""
        if found_inf:
            self._scale *= self.backoff_factor
            self._growth_tracker = 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            grown = float(torch.tensor(self._scale * self.growth_factor, dtype=torch.float32))
            # As in GradScaler: the scale does not grow past the range of float32.
            self._scale = grown if grown != float("inf") else self._scale
            self._growth_tracker = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state with the keys of torch.amp.GradScaler's, so that each class loads the other's."""
        return {
            "scale": self._scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state of this class or of torch.amp.GradScaler.

        Raises:
            ConfigError: the state is empty.
        """
        if not state:
            raise ConfigError(
                "the checkpoint's loss scale is empty: it was saved by a run without loss scaling; load it with the "
                "precision that it was saved with"
            )
        self._scale = float(state["scale"])
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self._growth_tracker = int(state["_growth_tracker"])

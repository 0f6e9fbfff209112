"""Weight prediction: compute parameters as updates that are still pending are expected to leave them (lock-free mode).

Gradients at stale parameters are less useful: with momentum 0.9 and a delay of one step, descent is stable up to a curvature
of 1 / lr, without the delay up to 38 / lr. Weight prediction makes up for the delay. It has two parts, each cheap in time and
memory. The first is what momentum will do to each element without a new gradient; the update writes it into the compute copy.
The second is the response of a block of `ALIGN_NUMEL` elements to a gradient; it is stored (2 bytes a block) and used for
gradients that no update has applied yet. This module knows the formulas of Adam and SGD; updates of other optimizers are not
predicted.

Knows views and numbers; no pages, no threads. A prediction changes the copy that compute uses, never master states: the
update applies each gradient, once, to the exact master states.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from lightning_ptm.errors import InternalError
from lightning_ptm.terms import ALIGN_NUMEL
from lightning_ptm.update.flat_states import FlatStates, StateRun
from lightning_ptm.update.gradient_source import GradientSource, ParameterGradients, Transform
from lightning_ptm.update.shadow import GroupValues
from lightning_ptm.update.trial.traits import OptimizerTraits

_REUSE = 16
"""Curvature is reused from an earlier prediction until the number of steps has grown by a 16th. It is a mean over all steps
and hardly changes before that, and reading the second moment is a pass over 4 bytes an element."""

_CURVATURE_DTYPE = torch.bfloat16
"""Dtype of stored curvature: it has the range of float32, and two digits are more than the mean over a block deserves."""

_TINY_NOISE = 1 / 64
_WIDE_BLOCKS = 4
"""Blocks that share one norm where a gradient hardly adds to curvature. Each block counts the whole norm as its own, so no
block moves further than it should; norms over 64 elements would take half as long again as norms over 256."""

# By their whole names: other libraries' classes of the same name have other formulas.
_ADAM = frozenset(
    {"torch.optim.adam.Adam", "torch.optim.adamw.AdamW", "apex.optimizers.fused_adam.FusedAdam"},
)
_SGD = frozenset({"torch.optim.sgd.SGD"})


def can_predict_weights(traits: OptimizerTraits) -> bool:
    """Whether this optimizer's updates can be predicted."""
    return traits.name in _ADAM | _SGD


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    """Formula of one parameter group's next step: x -= gain * g / (sqrt(curvature + noise * mean(g * g)) + eps).

    `persistence` is the part of the last change that momentum would repeat without a gradient. `echo` is the part of a
    gradient's effect in its own step that momentum carries on: all of it, except for Nesterov's momentum, which has added
    some of the later effect in that step.
    """

    gain: float
    noise: float
    eps: float
    persistence: float
    second_moment: str | None
    scale: float
    """Ratio of curvature to the mean of the second moment."""
    echo: float = 1.0

    def moved(self, steps: int) -> float:
        """Distance that `steps` steps with the mean of their gradients go, in units of one step with the sum of them.

        The effect of each step includes its momentum in the steps after it.
        """
        later = sum((steps - later) * self.persistence**later for later in range(1, steps))
        return (steps + self.echo * later) / steps


def _rule(kind: str, group: Mapping[str, Any], steps: int) -> _Rule:
    """Returns the formula of the step that follows `steps` steps."""
    lr = float(group["lr"]) * (-1.0 if group.get("maximize") else 1.0)
    if kind in _SGD:
        momentum = float(group["momentum"])
        fresh = 1.0 if momentum == 0.0 else 1.0 - float(group["dampening"])
        if group.get("nesterov"):
            whole = 1.0 + momentum * fresh
            return _Rule(lr * whole, 0.0, 0.0, momentum, None, 0.0, momentum * fresh / whole)
        return _Rule(lr * fresh, 0.0, 0.0, momentum, None, 0.0)
    first, second = (float(beta) for beta in group["betas"])
    corrected = bool(group.get("bias_correction", True))

    def correction(beta: float, count: int) -> float:
        return 1.0 - beta**count if corrected else 1.0

    now, then = correction(first, steps), correction(first, steps + 1)
    return _Rule(
        gain=lr * (1.0 - first) / then,
        noise=(1.0 - second) / correction(second, steps + 1),
        eps=float(group["eps"]),
        persistence=first * now / then,  # assumes that the next gradient is as large as those before
        second_moment="exp_avg_sq",
        scale=second / correction(second, steps + 1),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Weight:
    """Weight of a gradient that is the sum over `steps` steps: it is multiplied by `factor`."""

    factor: float
    steps: int

    def under(self, rule: _Rule) -> float:
        """The weight in units of one step under a rule."""
        return self.factor * rule.moved(self.steps)


@dataclasses.dataclass(frozen=True, slots=True)
class _Stretch:
    """Elements [start, stop) of the shard with one rule."""

    start: int
    stop: int
    rule: _Rule


class WeightPrediction:
    """Prediction of one flat's next update, learned during an update.

    The updating thread learns it, chunk by chunk; any thread may read it once the job is done.

    Args:
        states: the flat's states before the update.
        hyper: hyper-parameters of the (last) step in the update, assumed for the next step, too.
        ahead: number of future steps for which momentum is followed.
        last: an earlier prediction of this flat, whose curvature may be reused; its job is done.
    """

    def __init__(
        self, states: FlatStates, hyper: GroupValues, ahead: int = 1, last: WeightPrediction | None = None
    ) -> None:
        self._states = states
        self._kind = states.traits.name
        self._hyper = hyper
        self._ahead = ahead
        self._learned: dict[tuple[int, int], int] = {}
        """By (start, stop) of a learned stretch, the number of steps at which its curvature was computed."""
        if last is None:
            self._curvature = torch.zeros(-(-states.flat.shard_numel // ALIGN_NUMEL), dtype=_CURVATURE_DTYPE)
        else:
            self._curvature = last._curvature
            self._learned.update(last._learned)
        self._owned = last is None
        """Whether the curvature may be changed in place: other threads may read that of `last`."""
        self._stretches: list[_Stretch] = []

    def learn(
        self,
        run: StateRun,
        before: torch.Tensor,
        parameter: torch.Tensor,
        slots: Mapping[str, torch.Tensor],
    ) -> None:
        """Learns from the update of a run, and writes into `before` its values after `ahead` steps of momentum alone.

        Args:
            run: the run, with its scalars before the step.
            before: its master values before the step; overwritten. parameter: the values after the step. slots: the states
                after the step. All of shape (run.numel,).
        """
        group = self._hyper.groups[run.group]
        steps = _steps(run, group) + 1
        rule = _rule(self._kind, group, steps)
        repeated = sum(rule.persistence**step for step in range(1, self._ahead + 1))
        torch.lerp(before, parameter, 1.0 + repeated, out=before)
        if rule.second_moment is not None:
            learned = self._learned.get((run.start, run.stop), 0)
            if not 0 <= steps - learned <= learned // _REUSE:
                self._keep_curvature(run, slots[rule.second_moment], rule.scale)
                self._learned[run.start, run.stop] = steps
        self._insert(_Stretch(run.start, run.stop, rule))

    def _insert(self, stretch: _Stretch) -> None:
        """Inserts a stretch in order. Adjacent stretches of the same rule are joined, as fewer stretches cost less."""
        place = bisect.bisect(self._stretches, stretch.start, key=lambda other: other.start)
        before = self._stretches[place - 1] if place else None
        if before is not None and before.stop == stretch.start and before.rule == stretch.rule:
            self._stretches[place - 1] = _Stretch(before.start, stretch.stop, stretch.rule)
        else:
            self._stretches.insert(place, stretch)

    def _keep_curvature(self, run: StateRun, moment: torch.Tensor, scale: float) -> None:
        if not self._owned:
            self._curvature, self._owned = self._curvature.clone(), True
        first = run.start // ALIGN_NUMEL
        whole = run.numel // ALIGN_NUMEL
        blocks = moment.narrow(0, 0, whole * ALIGN_NUMEL).view(whole, ALIGN_NUMEL)
        self._curvature[first : first + whole] = blocks.mean(1).mul_(scale)
        for segment in run.segments:
            if rest := segment.numel % ALIGN_NUMEL:  # its last block ends in padding
                mean = moment.narrow(0, segment.stop - rest - run.start, rest).mean()
                self._curvature[(segment.stop - 1) // ALIGN_NUMEL] = mean.cpu() * scale

    @torch.no_grad()
    def add_(
        self,
        values: torch.Tensor,
        gradient: GradientSource,
        transform: Transform,
        steps: int = 1,
    ) -> None:
        """Changes compute parameters in place as updates with this gradient are expected to change them.

        Args:
            values: the shard's compute parameters, (shard_numel,); no other code reads them during the call.
            gradient: the shard's gradient; it is complete.
            transform: the transform of the update; clipping by value is left out.
            steps: number of steps over which the gradient is the sum; the momentum of each in the later ones is included.
        """
        weight = _Weight(transform.factor, steps)
        if isinstance(gradient, ParameterGradients):
            for segment in self._states.segments:
                if gradient.has(segment.parameter):
                    self._add(values, segment.start, gradient.piece(segment), weight)
            return
        present = gradient.present(self._states.flat)
        whole = gradient.paged.tensor()
        for segment in self._states.segments:
            if present[segment.parameter]:
                self._add(values, segment.start, whole.narrow(0, segment.start, segment.numel), weight)

    def _add(self, values: torch.Tensor, start: int, gradient: torch.Tensor, weight: _Weight) -> None:
        """`add_` for a stretch of one parameter, which begins at a multiple of ALIGN_NUMEL."""
        gradient = gradient.to(values.device)
        stop = start + gradient.numel()
        place = bisect.bisect_right(self._stretches, start, key=lambda stretch: stretch.start) - 1
        for stretch in self._stretches[max(0, place) :]:
            if stretch.start >= stop:
                break
            begin, end = max(start, stretch.start), min(stop, stretch.stop)
            if begin < end:
                part = gradient.narrow(0, begin - start, end - begin)
                whole = part.numel() - part.numel() % ALIGN_NUMEL
                if whole:
                    blocks = part.narrow(0, 0, whole).view(-1, ALIGN_NUMEL)
                    self._answer(values, begin, blocks, stretch.rule, weight)
                if part.numel() > whole:
                    rest = part.narrow(0, whole, part.numel() - whole).view(1, -1)
                    self._answer(values, begin + whole, rest, stretch.rule, weight)

    def _answer(self, values: torch.Tensor, start: int, blocks: torch.Tensor, rule: _Rule, weight: _Weight) -> None:
        if start % ALIGN_NUMEL:
            raise InternalError(
                f"a stretch of a parameter begins at element {start}, which is no multiple of {ALIGN_NUMEL}"
            )
        total = rule.gain * weight.under(rule)
        if total == 0.0:
            return  # no momentum goes on
        count, width = blocks.shape
        # bfloat16 has the range for a gain that also undoes a loss scale; float16 has not.
        dtype = torch.float32 if values.dtype is torch.float16 else values.dtype
        if rule.second_moment is None:
            gain = torch.full((count, 1), total, dtype=dtype)
        else:
            first = start // ALIGN_NUMEL
            squares = _squares(blocks, wide=rule.noise <= _TINY_NOISE)
            curvature = squares.mul_(rule.noise * (weight.factor / weight.steps) ** 2 / width)
            curvature += self._curvature[first : first + count]
            gain = (total / curvature.sqrt_().add_(rule.eps)).to(dtype).unsqueeze(1)
        into = values.narrow(0, start, count * width).view(count, width)
        answer = into.to(dtype).addcmul_(blocks.to(dtype), gain.to(values.device), value=-1.0)
        if answer is not into:
            into.copy_(answer)


def _squares(blocks: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """Sum of squares of each block, (count, width) -> (count,); with `wide` that of its group of `_WIDE_BLOCKS` blocks."""
    # bfloat16 takes a third of float32's time and is precise enough; float16 might overflow.
    kind = torch.float32 if blocks.dtype is torch.float16 else None
    count, width = blocks.shape
    far = count - count % _WIDE_BLOCKS if wide else 0
    norms = torch.empty(count)
    if far:
        whole = torch.linalg.vector_norm(blocks[:far].view(-1, _WIDE_BLOCKS * width), dim=1, dtype=kind)
        norms[:far].view(-1, _WIDE_BLOCKS).copy_(whole.unsqueeze(1))
    if far < count:
        norms[far:] = torch.linalg.vector_norm(blocks[far:], dim=1, dtype=kind)
    return norms.square_()


def _steps(run: StateRun, group: Mapping[str, Any]) -> int:
    """Number of updates of a run's parameters so far."""
    step = group.get("step", 0) if run.scalars is None else run.scalars.values.get("step", group.get("step", 0))
    return int(step)

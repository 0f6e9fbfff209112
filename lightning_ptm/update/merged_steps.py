"""Several steps of Adam with the same gradient, as one call of the optimizer (lock-free mode, when the disk is behind).

With gradient g and k steps, the moments are known in closed form: m_k = b1^k m + (1 - b1^k) g, v_k = b2^k v + (1 - b2^k) g^2.
The parameter moves by the sum of lr_j m_j / sqrt(v_j). The mean of the m_j is one step of Adam, too, with another beta, and
v_j is taken to be v_k (so the move is wrong by 1 % for 3 steps and 3 % for 8 after 100 steps, and by up to 12 % after 20,
as measured with normal gradients); so a single call with chosen hyper-parameters makes the whole move and v_k, and a
`lerp` makes m_k of the mean. It costs two passes over the chunk in place of k. For Adam and AdamW; others take their steps
one by one.

Pure arithmetic of numbers: no tensors, pages or threads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_ptm.update.trial.traits import OptimizerTraits

FIRST_MOMENT = "exp_avg"
_ADAM = "torch.optim.adam.Adam"
_ADAMW = "torch.optim.adamw.AdamW"

YOUNG_STEPS = 10
"""Steps that are always taken one by one: the second moment still changes much in each, by up to a fifth of the move."""


@dataclasses.dataclass(frozen=True, slots=True)
class MergedSteps:
    """One call for several steps.

    Attributes:
        group: hyper-parameters of the call.
        step: the optimizer's count of steps before the call.
        correction: the first moment becomes `lerp(first moment, gradient, correction)` afterwards.
    """

    group: Mapping[str, Any]
    step: float
    correction: float


def merge(traits: OptimizerTraits, groups: Sequence[Mapping[str, Any]], step: float) -> MergedSteps | None:
    """One call for a step with each of `groups` after `step` steps, with one gradient; None where that cannot be.

    Args:
        groups: hyper-parameters of one parameter group at each step, the oldest first.
        step: steps that the parameters have had.
    """
    last, count = groups[-1], len(groups)
    # By the whole name: other libraries' classes of the same name have other formulas.
    if traits.name not in (_ADAM, _ADAMW) or step < YOUNG_STEPS:
        return None
    same = all(group[key] == last[key] for group in groups for key in ("betas", "eps", "weight_decay"))
    decoupled = traits.name == _ADAMW or bool(last.get("decoupled_weight_decay"))
    plain = not last.get("amsgrad") and not last.get("maximize") and (decoupled or last["weight_decay"] == 0)
    if not same or not plain:
        return None
    first, second = (float(beta) for beta in last["betas"])
    if first == 0.0:
        return None
    rates = [float(group["lr"]) for group in groups]
    total = sum(rates)
    powers = [first**taken for taken in range(1, count + 1)]
    share = sum(powers) / count  # of the old first moment in the mean of those after each step
    # The call counts steps in units of `count`, so that its correction of the second moment is that of the last step; its
    # correction of the first one is undone, and the mean of the true ones put in its place.
    counted = (step + count) / count
    wanted = sum(rate / (1.0 - first ** (step + taken)) for taken, rate in enumerate(rates, start=1))
    rate = wanted * (1.0 - share**counted)
    decay = float(last["weight_decay"]) * (total / rate if rate else 0.0)
    group = {**last, "lr": rate, "betas": (share, second**count), "weight_decay": decay}
    return MergedSteps(group, counted - 1.0, 1.0 - powers[-1] / share)

"""Encodings of optimizer states in pages (`optimizer_state_dtype`): which states are quantized, and what is refused.

Decides only; update/state_encoding.py implements the encodings.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ptm.config import Settings
from lightning_ptm.errors import ConfigError
from lightning_ptm.update.state_encoding import ENCODINGS, VALUES_DTYPE
from lightning_ptm.update.trial.traits import OptimizerTraits

_DIFFERENCE = frozenset({"square_avg", "grad_avg"})
"""States of a centered RMSprop: the mean of squares and the mean of gradients, from which it computes a variance."""


def encoded_traits(
    settings: Settings, traits: Sequence[Sequence[OptimizerTraits]], *, every_optimizer: bool
) -> tuple[tuple[OptimizerTraits, ...], ...]:
    """Returns the traits of the flats' optimizers with the encodings that the settings require.

    Args:
        every_optimizer: whether `traits` covers all optimizers. If not, unknown names are accepted: an optimizer whose
            parameters are all frozen now may keep states of any name later.

    Raises:
        ConfigError: an optimizer updates whole parameters, computes in another dtype than fp32, or subtracts states; or no
            state has a given name.
    """
    if not settings.encodes_states:
        return tuple(map(tuple, traits))
    every = [known for of_flat in traits for known in of_flat]
    names = {slot.name for known in every for slot in known.slots}
    strange = sorted(settings.state_dtypes.keys() - names)
    if strange and every_optimizer:
        raise ConfigError(
            f"optimizer_state_dtype names {', '.join(strange)}, and the optimizers of this run keep "
            f"{', '.join(sorted(names)) or 'none'}; give names among these, or one dtype for all"
        )
    element_wise = list({slot.name: None for known in every if not known.whole for slot in known.slots})
    return tuple(tuple(_encoded(settings, known, element_wise) for known in of_flat) for of_flat in traits)


def _encoded(settings: Settings, traits: OptimizerTraits, element_wise: Sequence[str]) -> OptimizerTraits:
    """Returns the traits of one optimizer with the encodings of its states.

    Args:
        element_wise: names of the states of all element-wise optimizers, for the error.
    """
    one = "auto" if settings.state_dtypes else str(settings.optimizer_state_dtype)
    wanted = {slot.name: settings.state_dtypes.get(slot.name, one) for slot in traits.slots}
    encodings = {name: ENCODINGS[word] for name, word in wanted.items() if word != "auto"}
    if not encodings:
        return traits
    if traits.whole:
        own = {slot.name for slot in traits.slots}
        others = {name: one for name in element_wise if one != "auto" and name not in own}
        remedy = (
            f"name the states of the others, optimizer_state_dtype={others}"
            if others
            else "use optimizer_state_dtype='auto'"
        )
        raise ConfigError(
            f"optimizer_state_dtype encodes states of element-wise optimizers, and {traits.name} updates each "
            f"parameter as a whole ({traits.whole}); {remedy}, or use an element-wise optimizer such as torch.optim.AdamW"
        )
    for slot in traits.slots:
        if slot.name in encodings and slot.dtype is not VALUES_DTYPE:
            raise ConfigError(
                f"optimizer_state_dtype encodes states that are computed in fp32, and {traits.name} computes {slot.name} in "
                f"{str(slot.dtype).removeprefix('torch.')} in this precision; use optimizer_state_dtype='auto', or precision "
                f"'bf16-mixed' or '32-true'"
            )
    differing = [group for group in traits.groups if {slot.name for slot in group.slots} >= _DIFFERENCE]
    if differing and _DIFFERENCE & encodings.keys():
        raise ConfigError(
            f"optimizer_state_dtype would round square_avg or grad_avg, and {traits.name} with centered=True divides by the "
            f"root of square_avg - grad_avg**2, which rounding can make negative; use centered=False, or name only other "
            f"states, as in optimizer_state_dtype={{'momentum_buffer': 'int8'}}"
        )
    return traits.encoded(encodings)

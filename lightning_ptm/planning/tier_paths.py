"""Which links a copy between two tiers takes, and which tiers it passes: the way of bytes, read off the rows of the tiers.

Knows rows (`terms.Tier`), not bytes: how a tier is made is memory's.

I1: the ways of all tiers lead to the one that computes, so that any two tiers have a way between them.
"""

from __future__ import annotations

from collections.abc import Collection

from lightning_ptm.errors import ConfigError
from lightning_ptm.terms import TIERS, Link, Tier


def way(tier: Tier, there: Collection[Tier]) -> list[Tier]:
    """The tiers that bytes of `tier` pass on their way to compute, itself first; of the others those that are there."""
    passed = [tier]
    while (following := passed[-1].toward) is not None:
        passed.append(following)
    return [each for each in passed if each is tier or each in there or each.computes]


def crossed(source: Tier, target: Tier, there: Collection[Tier]) -> list[Link]:
    """The links that a copy takes: toward compute as far as the ways of both differ, then back.

    Args:
        there: the tiers of the run.
    """
    up, down = way(source, there), way(target, there)
    links = [tier.link_toward for tier in up if tier not in down]
    links += [tier.link_back for tier in reversed(down) if tier not in up]
    return [link for link in links if link is not None]


def check_further(tiers: Collection[Tier]) -> None:
    """Tiers beside `TIERS`.

    Raises:
        ConfigError: a row that cannot work.
    """
    known = {tier.name: tier for tier in TIERS}
    for tier in tiers:
        if known.setdefault(tier.name, tier) is not tier or tier in TIERS:
            raise ConfigError(f"a further tier is called {tier.name}, as another one is; give it a name of its own")
        if tier.computes or not way(tier, ())[-1].computes:
            raise ConfigError(
                f"the further tier {tier.name} {'computes' if tier.computes else 'leads to no tier that computes'}; units "
                f"compute in {Tier.DEVICE.name} alone: give it computes=False and a tier `toward` that"
            )

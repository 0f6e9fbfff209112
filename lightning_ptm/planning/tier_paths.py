"""Paths of copies between tiers: the tiers and links that they cross.

Uses the table of tiers (`terms.Tier`), not bytes; memory/ builds the tiers.

I1: the paths of all tiers lead to the one that computes, so that any two tiers are connected.
"""

from __future__ import annotations

from collections.abc import Collection

from lightning_ptm.errors import ConfigError
from lightning_ptm.terms import TIERS, Link, Tier


def path_to_compute(tier: Tier, there: Collection[Tier]) -> list[Tier]:
    """Returns the tiers that bytes of `tier` pass on their way to compute, `tier` itself first.

    Args:
        there: the tiers of the run; other tiers are skipped.
    """
    passed = [tier]
    while (following := passed[-1].toward) is not None:
        passed.append(following)
    return [each for each in passed if each is tier or each in there or each.computes]


def links_between(source: Tier, target: Tier, there: Collection[Tier]) -> list[Link]:
    """Returns the links that a copy crosses: toward compute as far as the two paths differ, then back.

    Args:
        there: the tiers of the run.
    """
    up, down = path_to_compute(source, there), path_to_compute(target, there)
    links = [tier.link_toward for tier in up if tier not in down]
    links += [tier.link_back for tier in reversed(down) if tier not in up]
    return [link for link in links if link is not None]


def check_added_tiers(tiers: Collection[Tier]) -> None:
    """Checks tiers that are added to the built-in `TIERS`.

    Raises:
        ConfigError: a tier that cannot work.
    """
    known = {tier.name: tier for tier in TIERS}
    for tier in tiers:
        if known.setdefault(tier.name, tier) is not tier or tier in TIERS:
            raise ConfigError(
                f"a further tier has the name {tier.name}, which another tier has, so they cannot be told apart; give it "
                "its own name"
            )
        if tier.computes or not path_to_compute(tier, ())[-1].computes:
            raise ConfigError(
                f"the further tier {tier.name} {'computes' if tier.computes else 'leads to no tier that computes'}, but "
                f"units compute in {Tier.DEVICE.name} alone; give it computes=False and a tier `toward` that leads there"
            )

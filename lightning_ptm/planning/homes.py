"""What placement decides with and decides: budgets, wishes, homes. Data only.

Owns no choice: placement.py makes it, the simulator checks it, the runtime allocates by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ptm.terms import Tier


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that this rank may use in each tier; 0 means that the tier does not exist."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int

    def of(self, tier: Tier) -> int:
        """The bytes of one tier."""
        return {Tier.DEVICE: self.device_bytes, Tier.HOST: self.host_bytes, Tier.DISK: self.disk_bytes}[tier]


@dataclass(frozen=True, slots=True)
class Homes:
    """The tiers that hold the truth of one unit's states between steps.

    Without kept gradients, a gradient home on the device has no bytes of its own: gradients pass through pages that
    they hold until the update has used them.
    """

    parameter: Tier
    gradient: Tier
    master: Tier


def arithmetic_tier(home: Tier, staging_tier: Tier) -> Tier:
    """Where what has this home is updated: there, or in staging where that is the disk."""
    return staging_tier if home is Tier.DISK else home


@dataclass(frozen=True, slots=True)
class Wishes:
    """Homes that the user asked for, for all units; None leaves the choice to placement."""

    parameter: Tier | None = None
    master: Tier | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Homes of all units, and how the tiers are divided.

    Args:
        homes: one per unit.
        master_bytes_per_element: one per flat of the layout; 0 for frozen ones.
        keeps_gradients: whether gradients outlive the backward pass (accumulation, clipping by norm).
        device_home_bytes: device bytes of homes; host_home_bytes and disk_home_bytes likewise.
        gather_bytes: device bytes for gathered flats, fetched pages and passing gradients: whole pages; never more
            than they could all use at once.
        staging_bytes: bytes through which updates stream between the disk and the CPU, in `staging_tier`: RAM, which is
            the device tier where there is no host tier.
        non_model_peak_bytes: device bytes left to activations and everything else that is no page.
    """

    homes: tuple[Homes, ...]
    master_bytes_per_element: tuple[int, ...]
    keeps_gradients: bool
    device_home_bytes: int
    host_home_bytes: int
    disk_home_bytes: int
    gather_bytes: int
    staging_bytes: int
    staging_tier: Tier
    non_model_peak_bytes: int

    def staged_bytes(self, tier: Tier) -> int:
        """Bytes of staging in one tier."""
        return self.staging_bytes if tier is self.staging_tier else 0

    def home_bytes(self, tier: Tier) -> int:
        """Bytes of homes in one tier."""
        return {
            Tier.DEVICE: self.device_home_bytes,
            Tier.HOST: self.host_home_bytes,
            Tier.DISK: self.disk_home_bytes,
        }[tier]

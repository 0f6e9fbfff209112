"""Values, masters and states go from the pages of one layout to those of another one, wherever these are, on one rank.
Several ranks: tests/ranks; whole runs: tests/adversarial/test_laid_out_anew.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from handed_by_hand import assert_states, new_pages, old_pages, scalars_of
from values_by_hand import MIXED, PLACES, Odd, assert_equal, copies, values_of

from lightning_ptm.comm import SoloCommunicator


@pytest.mark.parametrize("options", [{}, MIXED], ids=["true", "mixed"])
@pytest.mark.parametrize("after", list(PLACES))
@pytest.mark.parametrize("before", list(PLACES))
def test_all_bits_go_along(disk: Path, before: str, after: str, options: dict[str, object]) -> None:
    """What was frozen trains, what trained is frozen, and the rest lies elsewhere."""
    module = Odd()
    expected = copies(module)
    with old_pages(module, disk, before, **options) as (_, handed, optimizer, states):
        handed.free_all_but_states()
        module.frozen.requires_grad_(True)
        module.blocks[0].weight.requires_grad_(False)
        optimizer.add_param_group({"params": [module.frozen]})
        with new_pages(module, disk, after, handed, optimizer, **options) as (made, _):
            made.take_over(keep_frozen=True, handed=handed)
            made.optimizer_values.load(0, scalars_of(states), handed=handed)
            handed.close()
            assert_equal(values_of(made), expected)
            assert_states(made, states)
            for flats in made.flats:
                for flat in flats:
                    master = made.gathered_flats.master(flat.store)
                    if master is not None:
                        rounded = made.gathered_flats.read(master).to(torch.bfloat16)
                        assert torch.equal(made.gathered_flats.read(flat.store.values), rounded)


def test_a_value_is_told_as_it_was(disk: Path) -> None:
    module = Odd()
    expected = copies(module)
    with old_pages(module, disk, "masters on disk", **MIXED) as (_, handed, _, _):
        for name, parameter in module.named_parameters():
            assert parameter in handed and handed.dtype(id(parameter)) is torch.float32
            value = handed.precise(id(parameter), SoloCommunicator())
            assert torch.equal(value, expected[name]) and value.stride() == expected[name].stride()
        assert torch.nn.Parameter(torch.zeros(3)) not in handed
        assert not handed.resharder.irreversible
        assert handed.bytes_in_memory() and handed.bytes_on_disk()


def test_of_old_memory_nothing_is_left_when_all_is_read(disk: Path) -> None:
    module = Odd()
    with (
        old_pages(module, disk, "ram", **MIXED) as (old, handed, optimizer, states),
        new_pages(module, disk, "ram", handed, optimizer, **MIXED) as (made, _),
    ):
        made.take_over(keep_frozen=True, handed=handed)
        made.optimizer_values.load(0, scalars_of(states), handed=handed)
        assert handed.resharder.irreversible
        homes = [flat.home for flat in handed.flats.values()]
        kept = [old.gathered_flats.read(home).float().count_nonzero().item() for home in homes]
        # But for what shares a page of the system with padding, or what is read again.
        assert sum(kept) <= len(homes) * 2 * 4096, kept

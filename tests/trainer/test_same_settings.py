"""Settings by which ranks would wait for each other: all are told which, before anything waits."""

from __future__ import annotations

import pytest

from lightning_ptm.config import Settings
from lightning_ptm.errors import RankError
from lightning_ptm.trainer.same_settings import decisive, refuse_other_settings


def test_equal_settings_and_budgets_of_a_rank_s_own_are_accepted() -> None:
    ours = decisive(Settings(), "32-true")
    theirs = decisive(Settings(host_memory="1GiB", disk_path="/elsewhere"), "32-true")
    refuse_other_settings([ours, theirs, ours])


def test_all_are_told_whose_setting_differs() -> None:
    ours = decisive(Settings(), "32-true")
    with pytest.raises(
        RankError, match=r"rank 2 has async_save=True, where rank 0 has async_save=False; .* use the same"
    ):
        refuse_other_settings(
            [ours, ours, decisive(Settings(checkpoints={"async_save": True, "state_dict_type": "sharded"}), "32-true")]
        )


def test_what_rank_0_chooses_for_all_is_compared_where_it_chooses() -> None:
    differ = [{"recompute": "all"}, {"offload_activations": "none"}]
    for given in differ:
        refuse_other_settings([decisive(Settings(), "32-true"), decisive(Settings(**given), "32-true")])
        automatic = [decisive(Settings(parallel="auto", **more), "32-true") for more in ({}, given)]
        with pytest.raises(RankError, match=f"rank 1 has {next(iter(given))}="):
            refuse_other_settings(automatic)

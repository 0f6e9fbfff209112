"""Assignment of flats to optimizers and groups, without a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from decided_by_hand import Net, decided, laid_out
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.runtime.updates.optimizer_groups import OptimizerGroups
from lightning_ptm.update.shadow import snapshot


@contextmanager
def groups_of(
    make: Callable[[list[nn.Parameter]], list[Optimizer]],
) -> Iterator[tuple[OptimizerGroups, list[Optimizer], list[nn.Parameter]]]:
    """Yields the optimizer groups of a module of three units."""
    module = Net(2)
    optimizers = make(list(module.parameters()))
    with laid_out(decided(module, optimizers)) as pages:
        yield OptimizerGroups(pages.flats, optimizers), optimizers, list(module.parameters())


def never() -> None:
    raise AssertionError("nothing has changed")


def test_flats_of_each_optimizer_come_as_gradients_do() -> None:
    with groups_of(lambda p: [SGD(p[:1], lr=0.1), SGD(p[1:], lr=0.5)]) as (groups, optimizers, parameters):
        assert [groups.index_of(each) for each in optimizers] == [0, 1]
        assert [unit for unit, _ in groups.flats_of(1)] == [2, 1] and [unit for unit, _ in groups.flats_of(0)] == [0]
        assert {id(each) for each in groups.parameters_of(1)} == {id(each) for each in parameters[1:]}
        with pytest.raises(ConfigError, match="SGD was not returned by configure_optimizers"):
            groups.index_of(SGD([torch.zeros(1)]))


def test_states_follow_who_is_moved_when_all_updates_are_done() -> None:
    with groups_of(lambda p: [SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.5}], lr=0.1)]) as (groups, (sgd,), _):
        groups.follow(0, never)
        first, second = sgd.param_groups
        first["params"].append(second["params"].pop())
        assert not groups.outgrown(0)
        waited: list[bool] = []
        groups.follow(0, lambda: waited.append(True))
        groups.follow(0, never)
        assert waited == [True]
        in_groups = sorted(group for _, flat in groups.flats_of(0) for group in flat.states.groups)
        assert in_groups.count(0) == len(first["params"]) and in_groups.count(1) == len(second["params"])


def test_who_is_new_outgrows_the_pages_and_is_refused_in_a_step() -> None:
    with groups_of(lambda p: [SGD(p, lr=0.1)]) as (groups, (sgd,), _):
        sgd.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3)))
        assert groups.outgrown(0)
        with pytest.raises(UsageError, match=r"shape \(3,\) was put into a group of SGD during a batch.*between two"):
            groups.follow(0, lambda: None)
        sgd.param_groups[0]["params"].pop()
        assert not groups.outgrown(0)
        sgd.add_param_group({"params": []})
        assert groups.outgrown(0)


def test_groups_stay_what_they_were_when_a_unit_was_updated() -> None:
    with groups_of(lambda p: [SGD(p, lr=0.1)]) as (groups, (sgd,), _):
        used = snapshot(sgd, groups.flats_of(0)[0][1].states.traits)
        groups.check_unchanged(0, used)
        sgd.param_groups[0]["lr"] = 0.2
        with pytest.raises(
            UsageError, match="lr in the optimizer's param_groups changed between the backward pass and"
        ):
            groups.check_unchanged(0, used)

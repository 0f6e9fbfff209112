"""States of each kind that this rank has, on one rank. Several ranks: tests/ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from values_by_hand import MIXED, Odd, run_of, states_for, values_of

from lightning_ptm.storage.index import PARAMETERS


@pytest.mark.parametrize("place", ["ram", "all on disk"])
def test_kinds_cover_every_element_once(disk: Path, place: str) -> None:
    module = Odd()
    with run_of(module, disk, place, **MIXED) as made:
        made.take_over(keep_frozen=True)
        made.optimizer_values.load(0, states_for(module, "head", "bias", "blocks.0.weight"))
        kinds = made.sharded_kinds.kinds(optimizers=True)
        assert [(kind.unit, kind.kind) for kind in kinds] == [
            (unit, kind) for unit in ("", "blocks.0", "blocks.1") for kind in (PARAMETERS, "exp_avg", "exp_avg_sq")
        ]
        assert [kind.kind for kind in made.sharded_kinds.kinds(optimizers=False)] == [PARAMETERS] * 3
        whole = {PARAMETERS: values_of(made), "exp_avg": {}, "exp_avg_sq": {}}
        for parameter, state in made.optimizer_values.states(0):
            name = next(name for name, each in module.named_parameters() if each is parameter)
            for slot in ("exp_avg", "exp_avg_sq"):
                whole[slot][name] = state[slot]
        told: dict[str, set[str]] = {PARAMETERS: set(), "exp_avg": set(), "exp_avg_sq": set()}
        for kind in kinds:
            covered = {name: torch.full((torch.Size(shape).numel(),), torch.nan) for name, _, shape in kind.tensors}
            told[kind.kind] |= covered.keys()
            for flat in kind.flats:
                elements = made.gathered_flats.read(flat.paged)
                for part in flat.segments:
                    target = covered[flat.parameters[part.parameter].name][part.parameter_start :][: part.numel]
                    assert target.isnan().all()
                    target.copy_(elements[part.start : part.stop])
                for spec, start, values in flat.outside:
                    assert spec.name == "frozen" and kind.kind == PARAMETERS
                    covered[spec.name][start : start + values.numel()] = values
            for name, dtype, shape in kind.tensors:
                expected = whole[kind.kind][name]
                # In the order of memory, as a flat holds it.
                expected = expected.t().reshape(-1) if name == "turned" else expected.reshape(-1)
                assert torch.equal(covered[name], expected) and dtype is torch.float32, (kind.kind, name)
                assert torch.Size(shape) == whole[kind.kind][name].shape
        assert told == {kind: set(values) for kind, values in whole.items()}

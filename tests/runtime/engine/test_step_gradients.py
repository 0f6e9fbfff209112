"""Steps with gradients in pages, of an engine that is driven by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_by_hand import (
    HOMES,
    looks_twice,
    run,
)
from other_stream import OtherStream

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.gradients.flat_gradient import FlatGradient
from lightning_ptm.update.loss_scale import LossScale


def test_gradients_of_two_passes_add_up_and_are_forgotten(disk: Path) -> None:
    with run(disk, **HOMES["all on disk"], keep_gradients=True) as it:
        it.backward()
        once = float(it.engine.stepping.gradient_norm(it.optimizers[0]))
        it.backward()
        assert float(it.engine.stepping.gradient_norm(it.optimizers[0])) == 2 * once
        it.engine.stepping.zero_grad(it.optimizers[0], forget=True)
        assert float(it.engine.stepping.gradient_norm(it.optimizers[0])) == 0


def test_whatever_stream_is_the_callers_gradients_are_unscaled_and_forgotten_on_the_runs(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = OtherStream()
    with run(disk, **HOMES["all on disk"], keep_gradients=True) as it:
        it.backward()
        with monkeypatch.context() as patched:
            stream.watch(patched, LossScale, "update")
            stream.watch(patched, FlatGradient, "clear", "zero")
            patched.setattr(it.engine.stepping, "stream", stream)
            assert it.engine.stepping.unscale(it.optimizers[0], LossScale(2.0))
            it.engine.stepping.zero_grad(it.optimizers[0], forget=False)
            it.engine.stepping.zero_grad(it.optimizers[0], forget=True)
    assert set(stream.noted) == {("update", True), ("zero", True), ("clear", True)}


def test_a_forward_that_writes_to_its_weight_is_refused_with_what_to_do_instead(disk: Path) -> None:
    looks_twice(disk, "in RAM", max_norm=0.1)
    with pytest.raises(
        UsageError, match=r"table\.weight was written to.* with max_norm\), leave that out and clip the weight"
    ):
        looks_twice(disk, "all on disk", max_norm=0.1)


@pytest.mark.parametrize("home", ["in RAM", "all on disk"])
def test_a_sparse_gradient_is_refused_at_the_first_step_by_its_parameters_name(disk: Path, home: str) -> None:
    with pytest.raises(
        UsageError, match=r"the gradient of table\.weight is sparse .* use sparse=False in its embedding"
    ):
        looks_twice(disk, home, sparse=True)

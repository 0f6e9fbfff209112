"""However a run ends under tensor parallelism, the module is whole afterwards, or of the whole shape without values, and the
next run takes it as any other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import PLAN, WIDTH, Blocks, is_whole, loader, module_of, trainer_of, weights_of
from test_expert_parallel_checkpoints import assert_same_states, read
from torch import Tensor, nn

from lightning_ptm.checkpoints import restore
from lightning_ptm.errors import RankError, UsageError
from lightning_ptm.parallel import ColwiseParallel


def readable(module: Blocks) -> bool:
    try:
        return all(bool(torch.isfinite(each).all()) for each in module.parameters())
    except UsageError:
        return False


class SaveLast(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def saved_afterwards(kind: str, folder: Path) -> None:
    module = module_of()
    trainer = trainer_of(2, 2, {"checkpoints": {"state_dict_type": kind}}, callbacks=[SaveLast(folder / "inside")])
    trainer.fit(module, loader(8))
    trainer.save_checkpoint(folder / "afterwards")
    trainer.save_checkpoint(folder / "weights", weights_only=True)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_checkpoint_after_a_run_is_what_it_would_have_been_inside(kind: str, tmp_path: Path) -> None:
    run_ranks(saved_afterwards, 2, kind, tmp_path)
    inside, afterwards = read(tmp_path / "inside"), read(tmp_path / "afterwards")
    assert_same_states(afterwards, inside)
    assert afterwards["optimizer_states"][0]["state"]
    weights = read(tmp_path / "weights")["state_dict"]
    assert all(torch.equal(weights[name], value) for name, value in inside["state_dict"].items())


def one_after_the_other(ranks: int, tensor: int, folder: Path) -> list[dict[str, Tensor]]:
    """Weights after each run of one module and one trainer; optimizer states go on, too."""
    found = []
    module = module_of()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    trainer = trainer_of(ranks, tensor, max_epochs=1)

    def note() -> None:
        assert is_whole(module) and readable(module)
        found.append(weights_of(module))

    trainer.validate(module, loader(4), verbose=False)
    note()
    trainer.fit(module, loader(8))
    note()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(8))
    note()
    trainer.validate(module, loader(4), verbose=False)
    note()
    other = trainer_of(ranks, tensor, max_epochs=1)
    other.fit(module, loader(8))
    note()
    kept = torch.load(save(module, folder / str(tensor)), weights_only=False)  # no run is left in it
    assert all(torch.equal(weights_of(kept)[name], value) for name, value in found[-1].items())
    return found


def save(module: Blocks, path: Path) -> Path:
    path = path.with_suffix(f".{os.environ['RANK']}")
    del module.__dict__["configure_optimizers"]  # which cannot be pickled
    torch.save(module, path)
    return path


def test_runs_of_one_module_one_after_the_other_learn_what_one_rank_learns(tmp_path: Path) -> None:
    (whole,) = run_ranks(one_after_the_other, 1, 1, 1, tmp_path)
    for cut in run_ranks(one_after_the_other, 2, 2, 2, tmp_path):
        assert len(cut) == len(whole) == 5
        for ours, theirs in zip(cut, whole, strict=True):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-12, msg=name)


def begun_apart(ranks: int, tensor: int) -> dict[str, Tensor]:
    """Weights after a run that learns nothing, of modules that were made of other random numbers on each rank."""
    module = module_of(seed=int(os.environ.get("RANK", 0)))
    trainer_of(ranks, tensor).validate(module, loader(4), verbose=False)
    return weights_of(module)


def test_the_first_rank_s_values_count_where_ranks_made_other_modules() -> None:
    expected = weights_of(module_of(seed=0).double())
    for found in run_ranks(begun_apart, 4, 4, 2, limit_s=240):
        assert all(torch.equal(found[name].double(), value) for name, value in expected.items())


class Breaks(L.Callback):
    def __init__(self, error: type[BaseException], where: str, rank: int | None = None) -> None:
        self.error, self.where, self.rank = error, where, rank

    def _at(self, where: str) -> None:
        if where == self.where and self.rank in (None, int(os.environ["RANK"])):
            raise self.error("broken off")

    def on_fit_start(self, *_: Any) -> None:
        self._at("fit_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self._at("batch_end")


def cut_short(path: Path) -> dict[str, bool]:
    """Returns which endings left values; after each, the same module trains from a checkpoint, whose weights it ends
    with."""
    expected = module_of()
    trainer_of(2, 2, callbacks=[SaveLast(path)]).fit(expected, loader(8))
    found = {}
    for error in (ValueError, KeyboardInterrupt):
        for where in ("fit_start", "batch_end"):
            module = module_of()
            with (
                pytest.raises(BaseException, match="broken off")
                if error is ValueError
                else pytest.raises(BaseException)
            ):
                trainer_of(2, 2, callbacks=[Breaks(error, where)]).fit(module, loader(8))
            goes_on(module, f"{error.__name__} at {where}", found, path, expected)
    module = module_of()
    trainer_of(2, 2, {"tuning": {"restore_weights": False}}).fit(module, loader(8))
    goes_on(module, "not wanted", found, path, expected)

    module, own = module_of(), restore.free_host_bytes
    # Both ranks' parts fit (and what is whole, twice), the whole of both does not.
    restore.free_host_bytes = lambda: int(sum(each.numel() * 8 for each in module.parameters()) * 1.5)  # type: ignore[assignment]
    trainer_of(2, 2).fit(module, loader(8))
    restore.free_host_bytes = own
    goes_on(module, "no room", found, path, expected)
    return found


def goes_on(module: Blocks, name: str, found: dict[str, bool], path: Path, expected: Blocks) -> None:
    assert is_whole(module), name
    found[name] = readable(module)
    trainer_of(2, 2, max_epochs=1).fit(module, loader(8), ckpt_path=path)  # which has ended: nothing is left to learn
    assert is_whole(module) and readable(module), name
    assert all(torch.equal(weights_of(module)[at], value) for at, value in weights_of(expected).items()), name


def test_a_run_that_is_cut_short_leaves_a_module_that_trains_again(tmp_path: Path) -> None:
    for found in run_ranks(cut_short, 2, tmp_path / "saved.ckpt"):
        assert found == {
            "ValueError at fit_start": False,
            "ValueError at batch_end": False,
            "KeyboardInterrupt at fit_start": False,
            "KeyboardInterrupt at batch_end": False,
            "not wanted": False,
            "no room": False,
        }


class KeepsLosses(Blocks):
    """Keeps a loss of each step with its graph, as whoever writes `self.kept.append(loss)`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.kept: list[Tensor] = []

    def loss(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(self.loss(batch))
        return loss


def kept_graphs(keeps: bool, *sizes: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = KeepsLosses()
    plan = PLAN | {"head": ColwiseParallel(gather=True)}
    for size in sizes:
        trainer = trainer_of(2, size, {"tensor_parallel": {"plan": plan}} if size > 1 else ())
        trainer.fit(module, loader(8))
        if not keeps:
            module.kept.clear()
    return weights_of(module)


def test_a_loss_that_is_kept_with_its_graph_changes_nothing_in_the_next_run_of_another_size() -> None:
    kept, given_up = (run_ranks(kept_graphs, 2, keeps, 2, 1, 2) for keeps in (True, False))
    for rank, weights in enumerate(kept):
        assert all(torch.equal(value, given_up[rank][name]) for name, value in weights.items())


class FailsToConfigure(Blocks):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        if os.environ["RANK"] == "1":
            raise ValueError("no such rate")
        return super().configure_optimizers()


def fails_to_configure() -> str:
    with pytest.raises((RankError, ValueError)) as caught:
        trainer_of(2, 2).fit(FailsToConfigure(), loader(2))
    return f"{caught.type.__name__}: {caught.value}"


def test_where_one_rank_fails_before_the_run_is_set_up_the_others_say_so() -> None:
    first, second = run_ranks(fails_to_configure, 2)
    assert second == "ValueError: no such rate"
    assert first.startswith("RankError: rank 1 failed with ValueError: no such rate while the run was set up")

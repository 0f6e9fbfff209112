"""Programs of users around a training with tensor parallelism, which any number of ranks runs.

A program trains a model on the same batches however many ranks there are, and returns what a user sees of it: each rank of
a tensor group has to see what one rank does that has the whole model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kit.fits import quiet_trainer
from kit.ranks.tensor_models import BATCH, LENGTH, VOCABULARY, Held, PreciseGPT
from kit.ranks.training import TIERS
from lightning_ptm import AngelPTMStrategy
from lightning_ptm.callbacks import GradNormMonitor, MemoryTimeline, PageMonitor, ThroughputMonitor
from lightning_ptm.cli import main
from lightning_ptm.runtime.autograd import offload
from lightning_ptm.runtime.deciding import decide

STEPS = 4


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a program runs.

    Attributes:
        tensor: ranks that cut the layers; there are no others.
        disk: folder of the disk tier, empty before and afterwards.
        files: folder for what a program writes, of these ranks alone.
    """

    tensor: int
    tier: str
    disk: Path
    files: Path

    def trainer(self, settings: Any = (), **options: Any) -> L.Trainer:
        """A quiet one, in float64."""
        os.environ.setdefault("RANK", "0")
        strategy = AngelPTMStrategy(
            page_size="64KiB",
            debug={"poison": True},
            disk_path=str(self.disk),
            tensor_parallel_size=self.tensor,
            timeout=timedelta(seconds=60),
            **{**TIERS[self.tier], **dict(settings)},
        )
        quiet: dict[str, Any] = {
            "devices": self.tensor,
            "precision": "64-true",
            "num_sanity_val_steps": 0,
            "max_epochs": 1,
            "log_every_n_steps": 1,
        }
        return quiet_trainer(strategy, **{**quiet, **options})


Seen = dict[str, Any]
"""Numbers, texts and tensors by name."""
Program = Callable[[Place], Seen]


def tokens(count: int = STEPS * BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(5))


def loader(count: int = STEPS * BATCH, length: int = LENGTH) -> DataLoader[Any]:
    return DataLoader(tokens(count, length), BATCH)  # type: ignore[arg-type]


def seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return build()


def learnt(module: nn.Module) -> Seen:
    """Losses of steps, and weights afterwards."""
    weights = {name: each.detach().clone() for name, each in module.named_parameters()}
    return {"losses": vars(module)["losses"], **{f"weight {name}": value for name, value in weights.items()}}


# -- training in other ways -------------------------------------------------------------------------------------------


class ByHand(PreciseGPT):
    """Two optimizers: blocks are updated after each batch, the rest after every other one with the sum of both; blocks'
    gradients are clipped by their own norm."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        blocks = {id(each) for each in self.blocks.parameters()}
        rest = [each for each in self.parameters() if id(each) not in blocks]
        often = torch.optim.AdamW(self.blocks.parameters(), lr=1e-3)
        return often, torch.optim.SGD(rest, lr=1e-1, momentum=0.9)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        often, seldom = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(often, 0.1, "norm")
        often.step()
        often.zero_grad()
        if batch_idx % 2:
            seldom.step()
            seldom.zero_grad()


def by_hand(place: Place) -> Seen:
    module = seeded(ByHand)
    place.trainer().fit(module, loader())
    return learnt(module)


class ByTurns(ByHand):
    """Blocks are in two optimizers, one of them in a third; each takes a step of its own in every batch, from where the
    others have left them."""

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.AdamW(self.parameters(), lr=1e-3),
            torch.optim.SGD(self.blocks.parameters(), lr=1e-2, momentum=0.9),
            torch.optim.AdamW(self.blocks[0].parameters(), lr=1e-3, betas=(0.8, 0.9)),
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            self.manual_backward(PreciseGPT.training_step(self, batch, batch_idx))
            if number == 0:
                self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()


def by_turns(place: Place) -> Seen:
    if place.tier == "lock_free":  # refused: where its masters would be
        place = dataclasses.replace(place, tier="masters_on_disk")
    module = seeded(ByTurns)
    place.trainer().fit(module, loader())
    return learnt(module)


def accumulated(place: Place) -> Seen:
    module = seeded(PreciseGPT)
    place.trainer(accumulate_grad_batches=2, gradient_clip_val=0.5).fit(module, loader())
    return learnt(module)


class ByShapes(PreciseGPT):
    """Rates go by the number of inputs, as those of layers that keep their learning rate in wider models do."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [each], "lr": 1e-2 / each.shape[-1]} for each in self.parameters()]
        return torch.optim.Adagrad(groups, initial_accumulator_value=0.1)


def by_shapes(place: Place) -> Seen:
    module = seeded(ByShapes)
    place.trainer().fit(module, loader())
    return learnt(module)


class Compiled(PreciseGPT):
    def configure_model(self) -> None:
        super().configure_model()
        for block in self.blocks:
            block.compile(backend="aot_eager")


def compiled(place: Place) -> Seen:
    torch._dynamo.reset()
    module = seeded(Compiled)
    place.trainer().fit(module, loader())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return {"compiled": graphs > 0, **learnt(module)}


class Sent(Callback):
    """How many bytes of activations have gone to RAM or disk."""

    count = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.count = trainer.strategy.engine.offload.sent_bytes  # type: ignore[attr-defined]


def activations_in_ram(place: Place) -> Seen:
    """On a CPU, which is let do it."""
    decide._check_device_of_its_own = lambda machine: None
    return _activations(place, "host")


def activations_on_disk(place: Place) -> Seen:
    return _activations(place, "disk")


def _activations(place: Place, to: str) -> Seen:
    offload.LEAST_BYTES = 512
    module, sent = seeded(PreciseGPT), Sent()
    place.trainer({"offload_activations": to}, callbacks=[sent]).fit(module, loader())
    return {"went": sent.count > 0, **learnt(module)}


# -- weights by hand --------------------------------------------------------------------------------------------------


class Halving(Callback):
    """Reads weights before the second step, halves those of the first block before the third, and streams all of them
    before the fourth."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.streamed: Seen = {}

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        if batch_idx == 1:
            with strategy.gathered(module, write=False):
                self.norms = [float(each.square().sum()) for each in module.parameters()]
        if batch_idx == 2:
            with strategy.gathered(module.blocks[0]), torch.no_grad():
                for each in module.blocks[0].parameters():
                    each.mul_(0.5)
        if batch_idx == 3:
            self.streamed = {f"weight streamed {name}": value.clone() for name, value in strategy.stream_weights()}


def gathered(place: Place) -> Seen:
    """The sum of squares over ranks is the whole parameter's, where each has a part."""
    module, halving = seeded(PreciseGPT), Halving()
    parts: list[int] = []

    class Sizes(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            parts.extend(each.numel() for each in pl_module.parameters())

    place.trainer(callbacks=[Sizes(), halving]).fit(module, loader())
    norms = torch.tensor(halving.norms, dtype=torch.float64)
    if place.tensor > 1:
        whole = [each.numel() for each in module.parameters()]
        mine = torch.tensor([part < all_of_it for part, all_of_it in zip(parts, whole, strict=True)])
        assert mine.any() and not mine.all()
        summed = norms.clone()
        torch.distributed.all_reduce(summed)
        norms = torch.where(mine, summed, norms)
    assert halving.streamed
    return {"norms": norms, **halving.streamed, **learnt(module)}


def exported(place: Place) -> Seen:
    """Exports checkpoints of both kinds, saved inside and after a run; each rank exports for itself."""
    seen: Seen = {}
    for kind in ("full", "sharded"):
        module, path = seeded(PreciseGPT), place.files / kind

        class Save(Callback):
            def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
                trainer.save_checkpoint(path / "inside")  # noqa: B023 called in this round

        trainer = place.trainer({"checkpoints": {"state_dict_type": kind}}, callbacks=[Save()])
        trainer.fit(module, loader())
        trainer.save_checkpoint(path / "behind", weights_only=True)
        for when in ("inside", "behind"):
            out = path / f"{when}-{os.environ['RANK']}"
            main(["export", str(path / when), str(out)])
            tensors = load_file(out / "model.safetensors")
            assert len(tensors) == len(list(module.parameters()))
            seen |= {f"weight {name}, {kind} {when}": value for name, value in tensors.items()}
    return seen


# -- evaluation -------------------------------------------------------------------------------------------------------


class Evaluated(PreciseGPT):
    def _note(self, batch: Tensor) -> None:
        self.log("loss", self.loss(batch), on_epoch=True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._note(batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._note(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[:, :-1]).log_softmax(-1)


def evaluated(place: Place) -> Seen:
    """Before a training, in it, and behind it."""
    module, seen = seeded(Evaluated), {}
    for when in ("before", "behind"):
        trainer = place.trainer()
        (told,) = trainer.validate(module, loader(8), verbose=False)
        seen[f"validated {when}"] = told["loss"]
        (told,) = trainer.test(module, loader(8), verbose=False)
        seen[f"tested {when}"] = told["loss"]
        seen[f"predicted {when}"] = torch.cat(trainer.predict(module, loader(8)))  # type: ignore[arg-type]
        if when == "before":
            trainer.fit(module, loader(), loader(8))
            seen["validated in training"] = float(trainer.callback_metrics["loss"])
    return {**seen, **learnt(module)}


# -- texts ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def continued(module: PreciseGPT, text: Tensor, top_k: int) -> Tensor:
    """Six tokens that follow each text, drawn from the `top_k` likeliest."""
    generator, given = torch.Generator().manual_seed(3), text.shape[1]
    for _ in range(6):
        values, following = module(text[:, -module.sequence_length :])[:, -1].double().topk(top_k)
        drawn = torch.multinomial(values.softmax(-1), 1, generator=generator)
        text = torch.cat([text, following.gather(1, drawn)], dim=1)
    return text[:, given:]


class Writes(PreciseGPT):
    """Continues a text in hooks, and for `trainer.predict`."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[Tensor] = []

    def write(self) -> None:
        for top_k in (1, 8):
            self.texts.append(continued(self, tokens(2, 5), top_k))

    def on_train_epoch_end(self) -> None:
        self.write()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.write()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return continued(self, batch, 1)


def written(place: Place) -> Seen:
    module, trainer = seeded(Writes), place.trainer()
    trainer.fit(module, loader(), loader(BATCH))
    module.texts += trainer.predict(module, loader(2, 5))  # type: ignore[arg-type]
    module.write()
    return {"texts": torch.stack(module.texts), **learnt(module)}


class WritesByTransformers(Held):
    def __init__(self) -> None:
        super().__init__("llama")
        self.texts: list[Tensor] = []

    def write(self) -> None:
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
        self.texts.append(self.model.generate(tokens(2, 5), do_sample=False, **options))
        torch.manual_seed(7)
        self.texts.append(self.model.generate(tokens(2, 5), do_sample=True, top_k=8, **options))

    def on_train_epoch_end(self) -> None:
        self.write()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.write()


def written_by_transformers(place: Place) -> Seen:
    module, trainer = seeded(WritesByTransformers), place.trainer()
    trainer.fit(module, loader(), loader(BATCH))
    module.write()
    return {"texts": torch.stack(module.texts), **learnt(module)}


# -- callbacks --------------------------------------------------------------------------------------------------------


class Frozen(PreciseGPT):
    """Trains its head alone at first; `BackboneFinetuning` unfreezes what is called a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.configure_model()
        self.backbone = self.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-3)


def finetuned(place: Place) -> Seen:
    module = seeded(Frozen)
    unfreezes = BackboneFinetuning(1, lambda epoch: 2.0, backbone_initial_ratio_lr=0.1, initial_denom_lr=5.0)
    place.trainer(max_epochs=3, callbacks=[unfreezes]).fit(module, loader())
    return learnt(module)


class Scheduled(Evaluated):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Logged(Callback):
    """Norms of gradients, which do not depend on clocks or on how many ranks there are."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.norms.append(float(trainer.callback_metrics["gradients/norm"]))


def watched(place: Place) -> Seen:
    """Stopped early, since losses rise by a learning rate that is too large."""
    module, logged = seeded(Scheduled), Logged()
    folder = place.files / os.environ.get("RANK", "0")
    monitors = [
        EarlyStopping("loss", patience=1, min_delta=0.3),
        LearningRateMonitor("step"),
        GradNormMonitor(),
        PageMonitor(),
        MemoryTimeline(),
        ThroughputMonitor(matrix_flops_per_s=1e9),
        logged,
    ]
    trainer = place.trainer(
        max_epochs=6,
        callbacks=monitors,
        logger=CSVLogger(folder, name="", version="logs"),
        default_root_dir=folder,
    )
    trainer.fit(module, loader(), loader(8))
    assert 0 < trainer.current_epoch < 6
    rates = monitors[1].lrs["lr-AdamW"]  # type: ignore[attr-defined]
    return {"epochs": trainer.current_epoch, "rates": rates, "norms": logged.norms, **learnt(module)}


PROGRAMS: dict[str, Program] = {
    "two optimizers by hand": by_hand,
    "rates by shapes": by_shapes,
    "parameters in several optimizers": by_turns,
    "accumulated and clipped": accumulated,
    "compiled blocks": compiled,
    "activations in RAM": activations_in_ram,
    "activations on disk": activations_on_disk,
    "weights gathered and written": gathered,
    "exported": exported,
    "evaluated": evaluated,
    "texts written": written,
    "texts written by Transformers": written_by_transformers,
    "finetuned": finetuned,
    "watched": watched,
}


def run(name: str, place: Place) -> Seen:
    """One rank's part."""
    return PROGRAMS[name](place)

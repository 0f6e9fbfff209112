"""Programs drawn from a seed: what is trained, where its states are, and what is done to it meanwhile."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from kit.memory import LEAST

BLOCKS = 3
BATCHES = 3
"""Batches of an epoch."""
HIDDEN = (96, 131, 80)
"""Hidden widths of the blocks."""
FEATURES = ("tied", "repeated", "dropout", "statistics", "vector")
"""Head tied to the embedding; the first block called twice; dropout in blocks; BatchNorm in the root; a parameter of one
element and one of none."""
MEMORY: dict[str, dict[str, Any]] = {
    "ram": {},
    "tiers": {"device_memory": "2MiB", "host_memory": "8MiB"},
    "tight": {"device_memory": LEAST},
}
HOMES = ("auto", "host", "disk")
OPTIMIZERS = ("SGD", "SGD with momentum", "Adam", "AdamW amsgrad", "RMSprop", "Adafactor", "two")
TRUE_PRECISIONS = ("32-true", "64-true", "bf16-true")
PRECISIONS = (*TRUE_PRECISIONS, "bf16-mixed", "16-mixed")
SAVES: dict[str, dict[str, Any]] = {
    "full": {"checkpoints": {"state_dict_type": "full"}},
    "sharded": {"checkpoints": {"state_dict_type": "sharded"}},
    "behind": {"checkpoints": {"state_dict_type": "sharded", "async_save": True}},
}
HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_train_epoch_end", "on_validation_end")
BETWEEN_STEPS = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")
ACTIONS = ("edit", "look", "state", "rate")
"""Weights are edited in `gathered`, the module is called without gradients, its state_dict is compared, the learning rate
changes."""
TALKS = ("all_reduce", "barrier", "objects", "later", "gathered", "with_gradient", "pair")
"""Collectives of the module's own, between blocks."""
ALONE = (
    *("on_train_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_train_end"),
    *("on_validation_start", "on_validation_epoch_end", "on_validation_end", "on_before_zero_grad"),
    "on_save_checkpoint",
)
"""Hooks in which one rank alone calls the module."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """One fit of the program.

    Attributes:
        begins: "fresh" (a new module), "same" (the module of the last fit), "resumed" (a new one, from the checkpoint).
        breaks: batch and place at which training raises, or None; block 0 to 2, "start" or "end" of the batch.
        validates: an evaluation follows it.
    """

    begins: str
    epochs: int
    breaks: tuple[int, int | str] | None = None
    validates: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A training; equal on all ranks.

    Attributes:
        home: MEMORY, offload_parameters, offload_optimizer, and "synchronous" or "lock-free".
        frozen: by block, the batch from which on it is trained (a large one: never).
        orders: by batch and rank, the blocks that are called.
        actions: hook, batch and what is done there.
        no_loss: batches whose training_step returns None.
        talks: by batch, kinds of collectives, and for each rank after how many of its blocks it comes to each.
        alone: (hook, rank) of forwards of one rank alone.
        evaluations: batches of each rank; empty: no evaluation in a fit.
        raises: rank, batch and place (in its order) at which one rank raises; or rank and hook.
    """

    features: tuple[str, ...]
    home: tuple[str, str, str, str]
    settings: tuple[tuple[str, Any], ...]
    optimizer: str
    precision: str
    accumulate: int
    clip: tuple[float, str] | None
    saves: str
    fits: tuple[Fit, ...]
    frozen: tuple[tuple[int, int], ...]
    orders: tuple[tuple[tuple[int, ...], ...], ...]
    actions: tuple[tuple[str, int, str], ...]
    no_loss: tuple[int, ...] = ()
    talks: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...] = ()
    alone: tuple[tuple[str, int], ...] = ()
    evaluations: tuple[int, ...] = ()
    raises: tuple[int, int | str, int] | None = None

    @property
    def ranks(self) -> int:
        return len(self.orders[0])

    @property
    def manual(self) -> bool:
        """Whether the program uses manual optimization."""
        return self.optimizer == "two"

    @property
    def by_plain_trainer(self) -> bool:
        """Whether a plain Trainer has the same bits. In mixed precisions it rounds differently, and it rounds weights
        of a checkpoint of 64-true."""
        resumed = any(fit.begins == "resumed" for fit in self.fits)
        return self.precision in TRUE_PRECISIONS and not (resumed and self.precision == "64-true")

    @property
    def exact(self) -> bool:
        """More than two ranks add up in another order than DDP, and so do two a norm, and sums of several passes."""
        as_with_ddp = self.ranks == 2 and self.accumulate == 1 and (self.clip is None or self.clip[1] == "value")
        return not self.by_plain_trainer or self.ranks == 1 or as_with_ddp

    def strategy_settings(self) -> dict[str, Any]:
        memory, parameters, masters, updates = self.home
        lock_free = {"lock_free": {"max_staleness": 0}} if updates == "lock-free" else {}
        homes = {"offload_parameters": parameters, "offload_optimizer": masters}
        return {**MEMORY[memory], **homes, **lock_free, **SAVES[self.saves], **dict(self.settings)}


def draw(seed: int, ranks: int = 1, *, raising: bool = False) -> Program:
    """The program of a seed. `raising`: one rank raises somewhere."""
    drawn = random.Random(f"{seed} {ranks} {raising}")
    chance = lambda probability: drawn.random() < probability  # noqa: E731
    alone = ranks == 1
    settings: dict[str, Any] = {"page_size": drawn.choice(["64KiB", "64KiB", "76KiB"])}
    if chance(0.4):
        settings["recompute"] = drawn.choice(["all", "every 2nd"])
    lock_free = chance(0.25)
    parameters = drawn.choice(HOMES[:2] if lock_free else HOMES)
    # Ranks that use different units need more memory than the least that a plan counts.
    memory = drawn.choice(tuple(MEMORY) if alone else ("ram", "tiers"))
    home = (memory, parameters, drawn.choice(HOMES), "lock-free" if lock_free else "synchronous")
    features = [each for each in FEATURES if chance(0.25)]
    if "recompute" in settings and "statistics" in features:
        features.remove("statistics")  # recomputing a BatchNorm updates its statistics twice, with torch's own, too
    precision = drawn.choice(PRECISIONS if alone else ("32-true", "32-true", "64-true", "bf16-mixed"))
    optimizer = drawn.choice(OPTIMIZERS if alone else [each for each in OPTIMIZERS if each != "Adafactor"])
    accumulate = drawn.choice([1, 1, 1, 2, 3]) if alone or optimizer != "two" else 1
    if accumulate > 1 and not alone:
        settings["tuning"] = {"reduce_gradients": "each_step"}
    clip = drawn.choice([(0.1, "norm"), (1e-3, "value")]) if chance(0.3) and (alone or optimizer != "two") else None
    steps = [
        tuple(tuple(drawn.sample(range(BLOCKS), drawn.choice([1, 2, 3, 3, 3]))) for _ in range(ranks))
        for _ in range(BATCHES)
    ]
    orders = (
        tuple(steps) if chance(0.5) or not alone else (tuple(tuple(range(BLOCKS)) for _ in range(ranks)),) * BATCHES
    )
    program = Program(
        features=tuple(features),
        home=home,
        settings=tuple(settings.items()),
        optimizer=optimizer,
        precision=precision,
        accumulate=accumulate,
        clip=clip,
        saves=drawn.choice(tuple(SAVES)),
        fits=_fits(drawn, alone) if not raising else (Fit("fresh", 1),),
        frozen=_frozen(drawn, ranks, accumulate, manual=optimizer == "two"),
        orders=orders,
        actions=tuple(
            (hook, drawn.randrange(BATCHES), drawn.choice(ACTIONS))
            for hook in drawn.choices(BETWEEN_STEPS, k=drawn.choice([0, 1, 2]))
        ),
        no_loss=(drawn.randrange(BATCHES),) if alone and optimizer != "two" and clip is None and chance(0.2) else (),
        talks=() if alone else tuple(_talks(drawn, orders[step]) for step in range(BATCHES)),
        alone=()
        if alone
        else tuple((drawn.choice(ALONE), drawn.randrange(ranks)) for _ in range(drawn.choice([0, 1, 3]))),
        evaluations=tuple(drawn.choice([1, 2, 3]) for _ in range(ranks)) if chance(0.5) or not alone else (),
        raises=None if not raising else _raises(drawn, ranks),
    )
    if program.exact or optimizer != "RMSprop" or precision != "32-true":
        return program
    # Where sums have another order, the last bits of gradients differ, and RMSprop divides by the size of the smallest.
    return dataclasses.replace(program, precision="64-true")


def _fits(drawn: random.Random, alone: bool) -> tuple[Fit, ...]:
    first = Fit("fresh", drawn.choice([1, 2]), validates=drawn.random() < 0.2)
    kind = drawn.choice(["one", "resumed", "same", "broken"] if alone else ["one", "one", "resumed", "same"])
    if kind == "one":
        return (first,)
    if kind == "broken":
        place = drawn.choice([*range(BLOCKS), "start", "end"])
        broken = dataclasses.replace(first, breaks=(drawn.randrange(first.epochs * BATCHES), place))
        return broken, Fit("same", 1)
    return first, Fit(kind, drawn.choice([1, 2]), validates=drawn.random() < 0.2)


def _frozen(drawn: random.Random, ranks: int, accumulate: int, *, manual: bool) -> tuple[tuple[int, int], ...]:
    blocks = drawn.sample(range(BLOCKS), drawn.choice([0, 0, 0, 1, 2] if ranks == 1 else [0, 0, 1]))
    if ranks > 1 or (accumulate > 1 and manual):
        firsts = [99]  # DDP reduces no gradient of what is unfrozen later; while gradients wait, unfreezing is refused
    else:
        firsts = [BATCHES, 99] if accumulate > 1 else [2, BATCHES, 99]
    return tuple((block, drawn.choice(firsts)) for block in blocks)


def _talks(drawn: random.Random, orders: tuple[tuple[int, ...], ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    places = [sorted(drawn.choices(range(len(order) + 1), k=3)) for order in orders]
    return tuple(
        (drawn.choice(TALKS), tuple(each[talk] for each in places)) for talk in range(drawn.choice([0, 1, 2, 3]))
    )


def _raises(drawn: random.Random, ranks: int) -> tuple[int, int | str, int]:
    rank = drawn.randrange(ranks)
    return (
        (rank, drawn.choice(ALONE), 0) if drawn.random() < 0.5 else (rank, drawn.randrange(BATCHES), drawn.randrange(2))
    )

"""Training steps of a run with pipeline stages: micro-batches, in the order of a schedule.

A `training_step` of Lightning runs the whole schedule, with all backward passes, and returns the loss without a graph; the
`zero_grad` and `backward` that Lightning calls behind it do nothing. The order of actions is data
(planning/schedules.py); what a stage computes of a forward is decided by runtime/autograd/stage_cut.py.

Owns the links to the neighbouring stages, and what a step logs until it is over.

I1: the loss of a training step and everything that it logs are those of the last stage, whose ranks send them to the other
    stages at the end of the step, so that callbacks and schedulers decide alike on all ranks. Steps of evaluations are
    computed to their end on every stage, from the output of the last block.
I2: random numbers are equal on all ranks of a batch, but for those that a stage's blocks draw (stage_cut.py, I4). A step
    draws one seed, from which those of each micro-batch follow: stages run the module's code up to different blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from typing_extensions import override

from lightning_ptm.comm import ProcessGroupCommunicator
from lightning_ptm.comm.stage_link import StageLink
from lightning_ptm.config import Settings
from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.planning.schedules import ActionKind, StageAction, actions, taken_by_message
from lightning_ptm.runtime.autograd.stage_cut import MicroForward
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.tensors import random_states
from lightning_ptm.terms import Mode
from lightning_ptm.torch_internals import is_compiled
from lightning_ptm.trainer.batch_steps import BatchSteps, CheckSchedule, Iteration
from lightning_ptm.trainer.divided_steps import DividedSteps
from lightning_ptm.trainer.micro_batches import LogRecorder, micro_batches, samples_of
from lightning_ptm.trainer.module_state import arguments_of_step
from lightning_ptm.trainer.precision import AngelPTMPrecision
from lightning_ptm.trainer.stage_check import StageCheck, StageResults


class PipelinedSteps(BatchSteps):
    """The steps of one rank of a pipeline.

    Args:
        iteration: context of a step of the engine.
        module: the module that trains.
        mesh: all ranks.
        links: to the other stages.
        checks: the steps of the run before which stages are compared, which a re-layout does not change.
        context: this rank's context group, if ranks divide sequences.
        trains: whether the run trains.

    Raises:
        ConfigError: the module cannot train in stages.
    """

    def __init__(
        self,
        iteration: Iteration,
        module: LightningModule,
        engine: Engine,
        mesh: Mesh,
        links: StageLinks,
        settings: Settings,
        precision: AngelPTMPrecision,
        backend: Backend,
        checks: CheckSchedule,
        context: TensorGroup | None = None,
        *,
        trains: bool,
    ) -> None:
        super().__init__(iteration)
        assert engine.stage_cut is not None
        if trains:
            check_trains_in_stages(module, mesh.sizes[Axis.STAGE])
        self._module = module
        self._engine = engine
        self._cut = engine.stage_cut
        self._links = links
        self._precision = precision
        self._backend = backend
        self._stages = mesh.sizes[Axis.STAGE]
        self._stage = mesh.stage(engine.communicator.rank)
        self._count = settings.micro_batches
        chunks = self._cut.chunks
        orders = [
            actions(settings.pipeline_schedule, self._stages, each, self._count, chunks) for each in range(self._stages)
        ]
        self._order = orders[self._stage]

        def taken(other: int, sent: ActionKind) -> list[int]:
            return taken_by_message(orders[other], self._stages, other, chunks, sent)

        self._taken_hidden = taken((self._stage + 1) % self._stages, ActionKind.BACKWARD)
        self._taken_gradients = taken((self._stage - 1) % self._stages, ActionKind.FORWARD)
        """By message from the next stage, and from the one before, how many of this rank's messages it has taken."""
        self._end = self._stages * chunks - 1
        """Position of the model's last run of blocks (planning/schedules.py)."""
        blocks = [unit.module for unit in engine.blueprint.units[1:]]
        again = settings.pipeline_schedule if chunks > 1 else ""
        self._check = StageCheck(module, self._stages, links.tell, checks, blocks, again)
        self._divided = BatchSteps(iteration)
        """Divides sequences over the ranks of a context group, if there is one, and a batch trains."""
        if context is not None and trains:
            self._divided = DividedSteps(iteration, module, context, settings.context_parallel, backend, self.evaluate)
        # state
        self._index = 0
        """The number of the present batch in the epoch, which a training step need not be given."""
        self._in_closure = False
        """Whether a training step has run its schedule, and Lightning has not called `backward` for it yet: what it clears
        until then are the step's gradients."""
        self.most_graphs = 0
        """The most graphs that this rank has kept at once, each of a micro-batch and a run of blocks. For tests."""

    @property
    def _is_last(self) -> bool:
        return self._stage == self._stages - 1

    @property
    @override
    def keeps_gradients(self) -> bool:
        return self._in_closure

    @property
    @override
    def ranks_of_sequence(self) -> int:
        return self._divided.ranks_of_sequence

    @override
    def positions(self, length: int, device: torch.device) -> Tensor:
        return self._divided.positions(length, device)

    @override
    def close(self) -> None:
        self._divided.close()

    @override
    def batch_starts(self, batch: Any, index: int) -> None:
        """Begins a batch; before some steps, checks that all stages compute the same loss of its first micro-batch, which
        changes no random states.

        Raises:
            ConfigError: losses, or arguments of blocks, differ between stages.
        """
        self._index = index
        self._divided.batch_starts(batch, index)
        trainer = self._module.trainer
        if not self._check.wanted(trainer.global_step):
            return
        first, part = not trainer.global_step, micro_batches(batch, self._count)[0]
        plugin = trainer.precision_plugin

        def compute(part: Any, results: StageResults, blocks_end: Callable[[], None]) -> Any:
            def step() -> Any:
                own = self._divided.part_of(plugin.convert_input(part))
                with self._divided.of_forward(), plugin.train_step_context():
                    return self._module.training_step(*arguments_of_step(self._module, own, index))

            whole = _StepOfAllStages(self._links, self._engine, results.see, blocks_end)
            # Each forward of a check draws the same random numbers.
            with random_states.restored(self._backend), self._iteration(Mode.FORWARD), self._random_numbers():
                micro, result = self._cut.forward_whole(step, whole)
            loss = result.get("loss") if isinstance(result, Mapping) else result
            self._cut.check_loss(micro, loss if isinstance(loss, Tensor) else None)
            return loss

        with random_states.restored(self._backend):
            self._check.check(partial(compute, part), trainer.global_step)
            # Ranks with other batches may have other numbers of samples, and all begin the same forwards.
            if first and self._engine.barriers.all_agree(samples_of(part) % 2 == 0):
                narrow = self._precision.plan.compute.itemsize < 4
                self._check.compare_halves(
                    [partial(compute, each) for each in (part, *micro_batches(part, 2))], narrow=narrow
                )

    @override
    def train(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs a training step with all its backward passes; returns its loss, without a graph."""
        trainer = self._module.trainer
        parts = [self._divided.part_of(each) for each in micro_batches(batch, self._count)]
        accumulated = trainer.accumulate_grad_batches
        if self._index % accumulated == 0:
            # As Lightning does before its backward pass, which is not this one.
            for optimizer in trainer.optimizers:
                self._module.optimizer_zero_grad(trainer.current_epoch, self._index, optimizer)
        logs = LogRecorder(self._module, self._count)
        losses: list[Tensor] = []

        def forward(action: StageAction, received: Tensor | None) -> tuple[MicroForward, Tensor | None]:
            random_states.seed(seed + action.micro, self._backend)
            ends = self._position(action) == self._end
            with nullcontext() if ends else logs.ignored(), self._divided.of_forward():
                micro, result = self._cut.forward(
                    lambda: step(parts[action.micro], *args, **kwargs), received, action.chunk
                )
            loss = _loss_of(result) if ends else None
            if not action.micro:
                self._cut.check_loss(micro, loss)
            if loss is not None:
                if not loss.requires_grad:
                    raise UsageError(
                        "training_step returned a loss that does not depend on the last block's output, or is detached from "
                        "it, so no stage would train; return the loss with its graph"
                    )
                losses.append(loss.detach())
                loss = loss / (self._count * accumulated)
                if self._precision.loss_scale is not None:
                    loss = self._precision.loss_scale.scale(loss)
            return micro, loss

        with (
            self._iteration(Mode.TRAIN),
            self._random_numbers() as seed,
            logs.recorded(),
            self._engine.stepping.without_reduction(),
        ):
            self._run(self._order, forward)
        total = torch.stack(losses).mean() if losses else None
        of_last, found = self._links.tell(None if total is None else (total.cpu(), logs.found()))
        logs.log(found, own=self._is_last)
        self._engine.stepping.withhold_gradients()
        self._in_closure = True
        loss: Tensor = total if total is not None else of_last.to(self._backend.device)
        return loss

    @override
    def ran_backward(self) -> bool:
        self._in_closure = False
        return True

    @override
    def evaluate(self, step: Callable[[], Any]) -> Any:
        """Runs a step of an evaluation for a whole batch, to its end on every stage."""
        whole = _StepOfAllStages(self._links, self._engine)
        with self._iteration(Mode.FORWARD), self._random_numbers():
            return self._cut.forward_whole(step, whole)[1]

    def _position(self, action: StageAction) -> int:
        """Returns the position of an action's run of blocks in the model."""
        return action.chunk * self._stages + self._stage

    def _run(
        self,
        order: Sequence[StageAction],
        forward: Callable[[StageAction, Tensor | None], tuple[MicroForward, Tensor | None]],
    ) -> None:
        kept: dict[tuple[int, int], tuple[MicroForward, Tensor | None]] = {}
        links = self._links
        taken_hidden, taken_gradients = iter(self._taken_hidden), iter(self._taken_gradients)
        try:
            for number, action in enumerate(order):
                position, place = self._position(action), (action.chunk, action.micro)
                if action.kind is ActionKind.FORWARD:
                    received = None
                    if position:
                        self._engine.meet_stage(number)
                        received = links.receive_hidden(next(taken_gradients))
                    micro, loss = kept[place] = forward(action, received)
                    self.most_graphs = max(self.most_graphs, len(kept))
                    if position < self._end:
                        assert micro.output is not None
                        links.send_hidden(micro.output)
                    continue
                micro, loss = kept.pop(place)
                gradient = None
                if position < self._end:
                    self._engine.meet_stage(number)
                    gradient = links.receive_gradient(next(taken_hidden))
                self._backward(micro.output if loss is None else loss, gradient)
                if position:
                    links.send_gradient(micro.taken_gradient())
            links.finish()
        except BaseException:
            links.forget()
            raise

    def _backward(self, end: Tensor | None, gradient: Tensor | None) -> None:
        assert end is not None
        if not end.requires_grad:
            return  # a stage whose parameters are all frozen, behind others of the kind
        with self._engine.backward(), self._precision.products():
            torch.autograd.backward(end, gradient)

    @contextmanager
    def _random_numbers(self) -> Iterator[int]:
        """Context of a step's random numbers; yields the seed, which all stages have drawn alike (I2)."""
        seed = int(torch.randint(1 << 48, ()))
        with random_states.restored(self._backend):
            random_states.seed(seed, self._backend)
            yield seed


class StageLinks:
    """Links of this rank to the stages before and behind its own, and to all stages of its batch. Collective.

    Args:
        communicator: of all ranks.
        device: the device that computes.
        wraps: whether the last stage sends hidden states to the first one, as stages have several runs of blocks.
    """

    def __init__(
        self, communicator: ProcessGroupCommunicator, mesh: Mesh, device: torch.device, *, wraps: bool
    ) -> None:
        stage, stages = mesh.stage(communicator.rank), mesh.sizes[Axis.STAGE]
        peers = mesh.groups((Axis.STAGE,))
        self._peers = communicator.subgroup(peers)
        made: dict[tuple[int, bool], StageLink] = {}
        for first in range(stages if wraps else stages - 1):  # all ranks make all links, in the same order
            for forward in (True, False):
                pairs = [[ranks[stages - 1 - first], ranks[(stages - 2 - first) % stages]] for ranks in peers]
                alone = [[rank] for ranks in peers for rank in ranks if not any(rank in pair for pair in pairs)]
                link = communicator.subgroup([*(sorted(pair) for pair in pairs), *alone], one_way=True)
                made[first, forward] = StageLink(link, device)
        before = (stage - 1) % stages
        self._hidden_in = made.get((before, True))
        self._hidden_out = made.get((stage, True))
        self._gradients_in = made.get((stage, False))
        self._gradients_out = made.get((before, False))

    def receive_hidden(self, taken: int = 0) -> Tensor:
        """Waits for the next hidden states of the stage before.

        Args:
            taken: number of gradients that it has taken in this step when it sends them.
        """
        assert self._hidden_in is not None
        received = self._hidden_in.receive()
        if self._gradients_out is not None:
            self._gradients_out.taken(taken)
        return received

    def send_hidden(self, output: Tensor) -> None:
        """Starts to send hidden states to the next stage."""
        assert self._hidden_out is not None
        self._hidden_out.send(output.detach())

    def receive_gradient(self, taken: int) -> Tensor:
        """Waits for the gradient of the oldest hidden states whose gradient the next stage has not sent.

        Args:
            taken: number of hidden states that it has taken in this step when it sends the gradient.
        """
        assert self._gradients_in is not None and self._hidden_out is not None
        received = self._gradients_in.receive()
        self._hidden_out.taken(taken)
        return received

    def send_gradient(self, gradient: Tensor) -> None:
        """Starts to send the gradient of hidden states to the stage before."""
        assert self._gradients_out is not None
        self._gradients_out.send(gradient)

    def last_output(self, own: Tensor | None, device: torch.device) -> Tensor:
        """Returns a tensor of the last stage. Collective among the stages of a batch.

        Args:
            own: the tensor, on the last stage.
            device: where the result is on the others.
        """
        dtype, shape = self.tell(None if own is None else (own.dtype, own.shape))
        value = torch.empty(shape, dtype=dtype, device=device) if own is None else own.contiguous()
        self._peers.broadcast(value)
        return value

    def tell(self, value: Any) -> Any:
        """Returns the value of the last stage, which is the first of the peers. Collective among the stages of a batch."""
        return self._peers.broadcast_object(value)

    def finish(self) -> None:
        """Waits until everything sent has left."""
        for each in (self._hidden_out, self._gradients_out):
            if each is not None:
                each.finish()

    def forget(self) -> None:
        """Forgets the sends of a step that failed."""
        for each in (self._hidden_out, self._gradients_out):
            if each is not None:
                each.forget()


class _StepOfAllStages:
    """Exchanges between stages in one forward that every stage runs to the end of the step.

    Args:
        see: receives the arguments of blocks.
        blocks_end: called after the last block.
    """

    def __init__(
        self,
        links: StageLinks,
        engine: Engine,
        see: Callable[..., None] = lambda *given: None,
        blocks_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._links = links
        self._engine = engine
        self.see = see
        self.blocks_end = blocks_end
        # state
        self._meetings = itertools.count()

    def receive(self) -> Tensor:
        """Returns the hidden states of the stage before."""
        self._meet()
        return self._links.receive_hidden()

    def hand_on(self, output: Tensor) -> None:
        """Sends hidden states to the next stage."""
        self._links.send_hidden(output)

    def _meet(self) -> None:
        self._engine.meet_stage(next(self._meetings))

    def last_output(self, own: Tensor | None) -> Tensor:
        """Returns the output of the model's last block. Collective among the stages of a batch."""
        self._links.finish()
        self._meet()
        return self._links.last_output(None if own is None else own.detach(), self._engine.backend.device)


def _loss_of(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) and set(result) == {"loss"} else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = (
            f"a dictionary of {', '.join(map(str, result))}" if isinstance(result, Mapping) else type(result).__name__
        )
        raise UsageError(
            f"training_step returned {given}, and with pipeline_parallel_size it returns the loss of a micro-batch, one "
            f"number; return it alone, and log what else there is"
        )
    return loss.reshape(())


def check_trains_in_stages(module: LightningModule, stages: int) -> None:
    """Raises:
    ConfigError: the module, whose Trainer has its optimizers, cannot train in stages.
    """
    what = f"pipeline_parallel_size={stages}"
    if not module.automatic_optimization:
        raise ConfigError(
            f"{what}: the {type(module).__name__} uses manual optimization, and a schedule runs all backward passes of a "
            f"step; return the loss from training_step, or use pipeline_parallel_size=1"
        )
    if is_overridden("backward", module):
        raise ConfigError(
            f"{what}: the {type(module).__name__} has a `backward` of its own, and a schedule runs all backward passes of a "
            f"step; leave it out, or use pipeline_parallel_size=1"
        )
    if len(module.trainer.optimizers) != 1:
        raise ConfigError(
            f"{what} with {len(module.trainer.optimizers)} optimizers: stages train with one; return one, with groups of "
            f"parameters, or use pipeline_parallel_size=1"
        )
    for name, each in module.named_modules():
        if getattr(each, "track_running_stats", False):
            raise ConfigError(
                f"{what}: {name} ({type(each).__name__}) keeps running statistics, which only its stage would have; use "
                f"norms that do not depend on the batch, such as LayerNorm, or pipeline_parallel_size=1"
            )
    compiled = next((name for name, each in module.named_modules() if is_compiled(each)), None)
    if compiled is not None:
        raise ConfigError(
            f"{what}: {compiled or type(module).__name__} is compiled by torch.compile, which may trace several blocks of "
            f"different stages; leave compile out, or use pipeline_parallel_size=1"
        )


def refuse_in_stages(callbacks: Sequence[Callback]) -> None:
    """Raises:
    ConfigError: a callback reads or changes parameters of blocks that only their stage has.
    """
    kinds = (StochasticWeightAveraging, WeightAveraging, BaseFinetuning, ModelPruning)
    names = [type(each).__name__ for each in callbacks if isinstance(each, kinds)]
    if names:
        raise ConfigError(
            f"{names[0]} with a pipeline_parallel_size above 1: it reads or changes weights of all blocks, of which a rank "
            f"has those of its stage; leave the callback out, or use pipeline_parallel_size=1"
        )

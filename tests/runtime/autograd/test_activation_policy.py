"""`offload_activations="auto"` and `recompute="auto"`: the policy by hand, and runs in which memory is said to be short."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from kit.outcomes import Outcome
from kit.plain_loop import PlainLoop, fit, tokens
from kit.stacks import ScheduledStack
from lightning.pytorch import Callback

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.transfer import LinkStats
from lightning_ptm.planning.activation_choice import Handling
from lightning_ptm.runtime.autograd import activation_policy, offload
from lightning_ptm.runtime.autograd.activation_policy import ActivationPolicy
from lightning_ptm.runtime.autograd.hooks import Hooks
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.terms import Tier

BATCHES = tokens(5)
BLOCKS = (1, 2, 3, 4)


class Machine:
    """Free memory of which each kept call takes some."""

    def __init__(self, free: int, of_call: int) -> None:
        self.whole = self.free = free
        self.of_call = of_call

    def iteration(self, policy: ActivationPolicy, input_bytes: int = 0) -> list[Handling]:
        self.free = self.whole
        policy.begin_iteration()
        handlings = []
        for unit in BLOCKS:
            handling = policy.call_begins(unit, lambda: input_bytes)
            self.free -= self.of_call if handling is Handling.KEEP else 0
            policy.call_ended(unit, self.of_call)
            handlings.append(handling)
        return handlings


class Ways:
    """Where activations go, by hand."""

    def __init__(
        self, host_bytes: float = math.inf, disk_bytes_per_s: int = 1 << 40, core_s_per_byte: float = 0.0
    ) -> None:
        self.host_bytes = host_bytes
        self.refused: set[Tier] = set()
        self.core_s = core_s_per_byte
        self.speeds = {Tier.HOST: 1 << 40, Tier.DISK: disk_bytes_per_s}

    def links(self) -> dict[str, LinkStats]:
        return {
            name: LinkStats(self.speeds[tier], 1, 1.0)
            for tier, ways in activation_policy._RATES.items()
            for name in ways
        }

    def room_bytes(self, tier: Tier) -> float:
        return self.host_bytes if tier is Tier.HOST else math.inf

    def core_s_per_byte(self, tier: Tier) -> float:
        return self.core_s


LOOK_S = activation_policy._LOOK_S


@pytest.fixture(autouse=True)
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_policy, "_LOOK_S", 0.0)


def test_a_forward_that_is_queued_in_no_time_is_looked_at_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host queues all units of a forward on a GPU before a second reading of free RAM would be due."""
    monkeypatch.setattr(activation_policy, "_LOOK_S", LOOK_S)
    monkeypatch.setattr(activation_policy, "perf_counter", lambda: 1.0)
    machine = Machine(1000, 130)
    ends: list[int] = []
    policy = ActivationPolicy((Handling.DISK,), lambda: machine.free, device_done=lambda: ends.append(machine.free))
    assert machine.iteration(policy) == [Handling.KEEP, Handling.KEEP, Handling.KEEP, Handling.DISK]
    assert not ends
    machine.iteration(policy)
    assert policy.measures and len(ends) == 2 * len(BLOCKS)  # around each unit


@pytest.mark.parametrize(("free", "read"), [(1 << 40, 2), (1 << 30, 10), (1 << 20, 48)])
def test_free_memory_is_read_the_less_often_the_more_there_is(
    monkeypatch: pytest.MonkeyPatch, free: int, read: int
) -> None:
    """In a second of ten steps: a reading takes up to 2 ms."""
    monkeypatch.setattr(activation_policy, "_LOOK_S", LOOK_S)
    now, reads = [1.0], list[int]()
    monkeypatch.setattr(activation_policy, "perf_counter", lambda: now[0])
    policy = ActivationPolicy((Handling.RECOMPUTE,), lambda: reads.append(free) or free)
    for _ in range(10):
        policy.begin_iteration()
        for unit in range(1, 101):
            assert policy.call_begins(unit, lambda: 0) is Handling.KEEP
            now[0] += 1e-3
    assert read <= len(reads) <= read + 2


@pytest.mark.parametrize(("input_bytes", "kept"), [(10, 2), (14, 0)])
def test_the_first_unit_is_expected_to_save_much_of_its_inputs(input_bytes: int, kept: int) -> None:
    """A unit is expected to save 16 times its inputs and is kept if 3.5 times that and a quarter of the memory are free: of
    1000 bytes, with inputs of 10 bytes, but not of 14. The policy reads the size of inputs only in the first iteration and
    after one in which memory was short."""
    asked: list[int] = []
    policy = ActivationPolicy((Handling.RECOMPUTE,), lambda: 1000)
    for _ in range(3):
        policy.begin_iteration()
        found = [policy.call_begins(unit, lambda: asked.append(1) or input_bytes) for unit in (1, 2)]
        assert found.count(Handling.KEEP) == kept
    assert len(asked) == (2 if kept else 6)


def test_given_handlings_stay_whatever_is_free() -> None:
    machine = Machine(1000, 900)
    policy = ActivationPolicy((Handling.DISK,), lambda: machine.free, Ways(), given={2: Handling.DISK})
    for _ in range(3):
        assert machine.iteration(policy) == [Handling.KEEP, Handling.DISK, Handling.KEEP, Handling.KEEP]
        assert policy.settled and policy.in_force == {2: Handling.DISK} and policy.counts


def test_a_policy_settles_once_handlings_are_chosen() -> None:
    machine = Machine(1000, 200)
    policy = ActivationPolicy((Handling.DISK,), lambda: machine.free, Ways())
    settled, in_force = [], []
    for _ in range(5):
        machine.iteration(policy)
        settled.append(policy.settled)
        in_force.append(len(policy.in_force))
    assert settled == [False, False, True, True, True]
    assert in_force[0] == in_force[1] > in_force[2] == in_force[3] == in_force[4] > 0


def test_all_is_kept_while_memory_suffices() -> None:
    machine = Machine(1000, 100)
    policy = ActivationPolicy((Handling.DISK, Handling.RECOMPUTE), lambda: machine.free)
    for _ in range(4):
        assert machine.iteration(policy) == [Handling.KEEP] * 4
        assert not policy.measures and not policy.handlings


def test_what_has_no_room_leaves_and_then_the_choice_is_of_measured_units() -> None:
    machine = Machine(1000, 200)
    policy = ActivationPolicy((Handling.DISK, Handling.RECOMPUTE), lambda: machine.free, Ways())
    assert machine.iteration(policy) == [Handling.KEEP, Handling.DISK, Handling.DISK, Handling.DISK]
    machine.iteration(policy)
    assert policy.measures
    # The first units have the most time to return.
    chosen = machine.iteration(policy)
    assert chosen[0] is Handling.DISK and chosen[-1] is Handling.KEEP
    assert chosen == [policy.handlings[unit] for unit in BLOCKS]
    assert [machine.iteration(policy) for _ in range(3)] == [chosen] * 3 and not policy.measures


@pytest.mark.parametrize(("host_bytes", "in_ram"), [(0, 0), (300, 1), (math.inf, 2)])
def test_what_ram_has_no_room_for_goes_to_disk(host_bytes: float, in_ram: int) -> None:
    machine = Machine(1100, 280)
    policy = ActivationPolicy((Handling.HOST, Handling.DISK), lambda: machine.free, Ways(host_bytes, 1 << 17))
    assert machine.iteration(policy)[3] is (Handling.HOST if host_bytes else Handling.DISK)
    machine.iteration(policy)
    assert policy.measures
    chosen = machine.iteration(policy)
    assert chosen.count(Handling.HOST) == in_ram and Handling.KEEP in chosen
    assert (Handling.DISK in chosen) == (in_ram < 2)


@pytest.mark.parametrize("options", [(Handling.HOST, Handling.RECOMPUTE), (Handling.HOST,)])
def test_without_room_in_ram_units_are_recomputed_if_they_may(options: tuple[Handling, ...]) -> None:
    machine = Machine(350, 300)
    policy = ActivationPolicy(options, lambda: machine.free, Ways(host_bytes=0))
    assert machine.iteration(policy)[1:] == [options[-1]] * 3


def test_a_backward_has_room_for_what_returns_and_its_temporaries() -> None:
    """Before anything is measured and after it, for calls that are large beside what is free."""
    for of_call in range(20, 310):
        machine = Machine(1000, of_call)
        policy = ActivationPolicy((Handling.DISK,), lambda machine=machine: machine.free, Ways())
        for _ in range(4):
            kept = machine.iteration(policy).count(Handling.KEEP)
            assert kept <= 1 or 1000 - kept * of_call >= of_call


@pytest.mark.parametrize(("core_s_per_byte", "chosen"), [(0.0, Handling.DISK), (1.0, Handling.RECOMPUTE)])
def test_time_on_cores_that_copies_take_from_compute_counts(core_s_per_byte: float, chosen: Handling) -> None:
    machine = Machine(1000, 200)
    ways = Ways(core_s_per_byte=core_s_per_byte)
    policy = ActivationPolicy((Handling.DISK, Handling.RECOMPUTE), lambda: machine.free, ways)
    handlings = [machine.iteration(policy) for _ in range(3)][-1]
    assert chosen in handlings and set(handlings) <= {Handling.KEEP, chosen}


def test_memory_that_allocators_had_in_freed_blocks_is_room() -> None:
    """Kept calls of the measured iteration take less of what is free than they save."""
    chosen = []
    for of_free in (200, 80):
        machine = Machine(1000, of_free)
        policy = ActivationPolicy((Handling.DISK,), lambda machine=machine: machine.free, Ways())
        policy.call_ended = partial(lambda ended, unit, saved: ended(unit, 200), policy.call_ended)  # type: ignore[method-assign]
        chosen.append([machine.iteration(policy) for _ in range(3)][-1].count(Handling.KEEP))
    assert chosen == [3, 4]


def test_a_larger_batch_than_the_chosen_one_is_safe() -> None:
    machine = Machine(1000, 200)
    policy = ActivationPolicy((Handling.DISK,), lambda: machine.free, Ways())
    for _ in range(3):
        machine.iteration(policy)
    assert Handling.KEEP in policy.handlings.values()
    machine.of_call = 900
    kept = machine.iteration(policy).count(Handling.KEEP)
    assert kept <= 1


def test_after_a_longer_batch_the_choice_of_a_shorter_one_is_not_trusted() -> None:
    """Memory is short in the first step, the second is measured and shorter, the third is as the first."""
    machine = Machine(1000, 300)
    policy = ActivationPolicy((Handling.DISK,), lambda: machine.free, Ways())
    first = machine.iteration(policy)
    machine.of_call = 100
    machine.iteration(policy)
    machine.of_call = 300
    assert machine.iteration(policy).count(Handling.KEEP) <= first.count(Handling.KEEP)
    assert set(policy.handlings.values()) == {Handling.KEEP}


def test_a_batch_that_grows_after_the_choice_is_seen() -> None:
    machine = Machine(1000, 190)
    policy = ActivationPolicy((Handling.DISK,), lambda: machine.free, Ways())
    for _ in range(3):
        chosen = machine.iteration(policy)
    assert chosen.count(Handling.KEEP) == 3
    machine.of_call = 260
    machine.iteration(policy)
    assert machine.iteration(policy).count(Handling.KEEP) == 0  # 250 and 3.5 times 260 would have to be free


def test_a_recomputed_unit_is_measured_as_what_it_would_save() -> None:
    """A recomputed unit saves only its inputs (20 bytes). The choice must use what it would save if it were kept (300 bytes);
    with 20, it would keep all units, which do not fit."""
    machine = Machine(1000, 300)
    ways = Ways(host_bytes=0)
    policy = ActivationPolicy((Handling.HOST, Handling.RECOMPUTE), lambda: machine.free, ways)
    for _ in range(3):
        machine.free = machine.whole
        policy.begin_iteration()
        kept = 0
        for unit in BLOCKS:
            handling = policy.call_begins(unit, lambda: 20)
            machine.free -= 20 if handling is Handling.RECOMPUTE else 300
            policy.call_ended(unit, 20 if handling is Handling.RECOMPUTE else 300)
            kept += handling is Handling.KEEP
        assert machine.free > 0 and kept <= 2
    assert policy.handlings


@pytest.mark.parametrize("options", [(Handling.HOST, Handling.RECOMPUTE), (Handling.HOST, Handling.DISK)])
def test_a_tier_without_room_for_a_call_is_passed_over(options: tuple[Handling, ...]) -> None:
    machine = Machine(1000, 300)
    policy = ActivationPolicy(options, lambda: machine.free, Ways(host_bytes=10))
    assert set(machine.iteration(policy, input_bytes=10)) <= {Handling.KEEP, options[1]}


def test_a_tier_that_has_refused_a_tensor_is_passed_over() -> None:
    machine = Machine(10_000, 500)
    ways = Ways()
    policy = ActivationPolicy((Handling.HOST, Handling.RECOMPUTE), lambda: machine.free, ways)
    policy.begin_iteration()
    while (handling := policy.call_begins(1, lambda: 0)) is Handling.KEEP:
        machine.free -= 500
    assert handling is Handling.HOST
    ways.refused.add(Tier.HOST)
    assert policy.call_begins(2, lambda: 0) is Handling.RECOMPUTE


def test_a_unit_that_cannot_be_recomputed_is_measured_as_it_is() -> None:
    """What it saves is not taken for the inputs of a recomputed call."""
    machine = Machine(1000, 300)
    policy = ActivationPolicy((Handling.HOST, Handling.RECOMPUTE), lambda: machine.free, Ways())
    begins = policy.call_begins

    def offloaded(unit: int, input_bytes: Callable[[], int]) -> Handling:
        handling = begins(unit, input_bytes)
        if handling.recomputes:
            policy.not_recomputed(unit, handling := Handling.HOST)
        return handling

    policy.call_begins = offloaded  # type: ignore[method-assign]
    for _ in range(3):
        machine.iteration(policy, input_bytes=20)
    assert policy._measured_bytes == 300
    assert Handling.RECOMPUTE not in policy.in_force.values()


def test_where_two_calls_have_no_room_a_unit_is_recomputed_rather_than_offloaded() -> None:
    policy = ActivationPolicy((Handling.HOST, Handling.RECOMPUTE), lambda: 1000, Ways())
    policy.begin_iteration()
    assert policy.call_begins(1, lambda: 15) is Handling.HOST  # is expected to save 240
    assert policy.call_begins(2, lambda: 25) is Handling.RECOMPUTE  # 400


# -- whole runs -------------------------------------------------------------------------------------------------------


@cache
def plain() -> Outcome:
    return PlainLoop(ScheduledStack).run(BATCHES)


class Handlings(Callback):
    """What the policy chose for each call, and how many bytes went away."""

    def __init__(self) -> None:
        self.seen: list[Handling] = []
        self.sent = 0

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        self._policy = trainer.strategy.engine.activation_policy
        if self._policy is not None:
            begins = self._policy.call_begins

            def noted(unit: int, input_bytes: Callable[[], int]) -> Handling:
                self.seen.append(begins(unit, input_bytes))
                return self.seen[-1]

            self._policy.call_begins = noted

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        away = trainer.strategy.engine.offload
        self.sent = 0 if away is None else away.sent_bytes


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at free memory finds an eighth less of what there was at first; after a quarter comes all again."""
    looks = [1 << 30]

    def room(engine: Engine) -> Any:
        def free() -> int:
            looks[0] = looks[0] - (1 << 27) if looks[0] > 1 << 28 else 1 << 30
            return looks[0]

        return free

    monkeypatch.setattr(Engine, "_activation_room", room)
    monkeypatch.setattr(activation_policy, "_TAKEN_BYTES_PER_S", math.inf)
    monkeypatch.setattr(offload, "LEAST_BYTES", 512)


AUTO = {"offload_activations": "auto", "recompute": "auto"}


@pytest.mark.slow_unless("ram", "three_tiers", "tight", "lock_free_three_tiers")
def test_numbers_are_those_of_a_plain_loop(short: None, strategy_at: Any, tier: str) -> None:
    handlings = Handlings()
    fit(ScheduledStack, BATCHES, strategy_at(tier, **AUTO), callbacks=[handlings]).assert_equal(plain())
    assert {Handling.KEEP, Handling.DISK} <= set(handlings.seen) and handlings.sent > 0


@pytest.mark.parametrize("where", ["ram", "three_tiers"])
def test_without_a_disk_units_are_recomputed(short: None, strategy_at: Any, where: str) -> None:
    handlings = Handlings()
    ours = fit(ScheduledStack, BATCHES, strategy_at(where, offload_activations="none"), callbacks=[handlings])
    ours.assert_equal(plain())
    assert {Handling.KEEP, Handling.RECOMPUTE} == set(handlings.seen)


def test_a_unit_that_was_kept_before_is_recomputed_once_that_is_chosen(
    monkeypatch: pytest.MonkeyPatch, strategy_at: Any
) -> None:
    recomputed: list[int] = []
    starts = Hooks._recompute_starts
    monkeypatch.setattr(Hooks, "_recompute_starts", lambda hooks, unit: (recomputed.append(unit), starts(hooks, unit)))
    turns = (Handling.KEEP, Handling.RECOMPUTE, Handling.DISK, Handling.RECOMPUTE_FROM_DISK, Handling.KEEP)
    calls: list[int] = []

    def begins(policy: ActivationPolicy, unit: int, input_bytes: Callable[[], int]) -> Handling:
        calls.append(unit)
        return turns[calls.count(unit) - 1]

    monkeypatch.setattr(ActivationPolicy, "call_begins", begins)
    ours = fit(ScheduledStack, BATCHES, strategy_at("three_tiers", **AUTO))
    ours.assert_equal(plain())
    assert calls.count(calls[0]) == len(turns)
    assert sorted(recomputed) == sorted([*set(calls), *set(calls)])  # in two of five steps


def test_with_room_nothing_changes(strategy_at: Any) -> None:
    handlings = Handlings()
    fit(ScheduledStack, BATCHES, strategy_at("ram", **AUTO), callbacks=[handlings]).assert_equal(plain())
    assert set(handlings.seen) == {Handling.KEEP} and handlings.sent == 0


def test_words_that_are_no_choice(strategy_at: Any) -> None:
    with pytest.raises(ConfigError, match="use 'auto', 'none', 'all', or 'every 2nd'"):
        strategy_at("ram", recompute="some")

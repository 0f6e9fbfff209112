"""Seconds of a step on a fake CUDA device with a clock (tests/fake_cuda/source/clock.h): overlap, measured without a
GPU."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fake_process import need_fake_device, on_fake, ranks_on_fake

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    need_fake_device()


def on_clock(program: str, speeds: str) -> str:
    """Returns the output of a program in a process with the fake device and its clock."""
    done = on_fake("-c", textwrap.dedent(program), FAKE_CUDA_NO_RACE="1", FAKE_CUDA_CLOCK=speeds)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_kernels_and_copies_take_their_time_beside_each_other_and_waits_are_told() -> None:
    program = """
        import fake_device, torch
        clock = fake_device.lib
        side = torch.cuda.Stream()
        pages = torch.zeros(250_000).pin_memory()  # 1 MB: 1 ms
        there = torch.empty(250_000, device="cuda")
        left = torch.empty(100, 100, device="cuda")  # 2e6 operations: 2 ms
        torch.cuda.synchronize()
        begun = clock.fc_clock_host()
        def ms(s): return round(1e3 * (s - begun), 3)

        with torch.cuda.stream(side):
            for _ in range(2):
                there.copy_(pages, non_blocking=True)
            arrived = side.record_event()
        left @ left
        assert ms(clock.fc_clock_host()) == 0  # it has launched, and waited for nothing
        assert not arrived.query() and not clock.fc_clock_waits()
        arrived.synchronize()
        assert abs(ms(clock.fc_clock_host()) - 2.0) < 0.01  # beside the product, one copy behind the other
        (wait,) = clock.fc_clock_waits().decode().splitlines()
        assert wait.startswith("0.00") and " 1 " in wait, wait
        assert abs(ms(clock.fc_clock_device(0)) - 2.0) < 0.01

        torch.cuda.current_stream().wait_event(arrived)  # the host goes on
        left @ left
        back = torch.empty(250_000).pin_memory()
        with torch.cuda.stream(side):
            there.copy_(pages, non_blocking=True)  # the other direction is free
            back.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert abs(ms(clock.fc_clock_host()) - 4.0) < 0.01, ms(clock.fc_clock_host())
        assert len(clock.fc_clock_waits().splitlines()) == 1
        left.sum().item()
        print("done", clock.fc_clock_waits().decode().count(chr(10)))
    """
    assert on_clock(program, "flops=1e9,memory=1e15,link=1e9,launch=0").split() == ["done", "1"]


STEPS = """
    import json, sys, warnings
    import fake_device, torch
    sys.path.insert(0, "tests/gpu")
    from test_cuda import Model
    from lightning.pytorch import Callback, Trainer
    from lightning_ptm import AngelPTMStrategy
    from torch.utils.data import DataLoader

    clock = fake_device.lib

    class Seconds(Callback):
        def __init__(self):
            self.steps, self.waits = [], []

        def now(self):
            return max(clock.fc_clock_host(), clock.fc_clock_device(0))

        def on_train_batch_start(self, *_):
            self.began_s = self.now()
            clock.fc_clock_waits()

        def on_before_backward(self, *_):
            self.forward_s = self.now() - self.began_s

        def on_train_batch_end(self, *_):
            self.waits = clock.fc_clock_waits().decode().splitlines()  # of the last step: the first one is traced
            self.steps.append(self.now() - self.began_s)

    class Looks(Callback):
        # Its hook is where gradients may be looked at: they are kept for the step.
        def on_after_backward(self, *_):
            pass

    def train(strategy, *others, batches=3, **options):
        torch.manual_seed(0)
        seconds = Seconds()
        trainer = Trainer(
            accelerator="gpu", devices=1, strategy=strategy, precision="bf16-mixed", max_steps=3,
            callbacks=[seconds, *others], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, **options,
        )
        data = torch.randint(0, 256, (8 * batches, 65), generator=torch.Generator().manual_seed(1))
        model = Model(width=128, layers=24)
        trainer.fit(model, DataLoader(data, batch_size=8))
        elements = sum(parameter.numel() for parameter in model.parameters())
        step_s = sum(seconds.steps[-batches // 3 :])
        return {"step_s": step_s, "forward_s": seconds.forward_s, "waits": seconds.waits, "elements": elements}

    homes = {"offload_parameters": "host", "offload_optimizer": "host", "device_memory": "24MiB", "host_memory": "256MiB"}
    found = {"plain": train("auto")}
    plain = found["plain"]
    fake_device.watch_update_thread(elements_per_s=plain["elements"] / (UPDATE_SHARE * plain["step_s"]))
    RUNS
    print(json.dumps(found))
"""
"""RUNS, beside Lightning's own strategy with everything on the device. The CPU's arithmetic takes UPDATE_SHARE of the
latter's step."""
SPEEDS = "flops=4e9,memory=1e11,link=1e7,launch=5e-6"


def seconds_of(runs: str, update_share: float) -> dict[str, dict[str, Any]]:
    """Returns the measurements, by name."""
    program = textwrap.dedent(STEPS).replace("RUNS", textwrap.dedent(runs)).replace("UPDATE_SHARE", str(update_share))
    found: dict[str, dict[str, Any]] = json.loads(on_clock(program, SPEEDS).splitlines()[-1])
    return found


@pytest.mark.parametrize("update_share", [0.001, 0.5, 0.8])
def test_a_step_with_states_in_ram_takes_as_long_as_what_takes_longest_and_the_host_runs_ahead(
    update_share: float,
) -> None:
    """A unit's way to the device takes 0.78 of its forward. Seconds are long beside the millisecond in which the thread of
    updates looks for gradients."""
    runs = """
        found["host"] = train(AngelPTMStrategy(page_size="64KiB", **homes))
        found["host masters"] = train(AngelPTMStrategy(page_size="64KiB", offload_optimizer="host"))
    """
    found = seconds_of(runs, update_share)
    longest_s = max(1.0, update_share) * found["plain"]["step_s"]
    assert found["host"]["waits"] == []
    assert found["host"]["step_s"] <= (1.05 if update_share < 0.1 else 1.10) * longest_s, found
    assert found["host masters"]["step_s"] <= 1.10 * longest_s, found


@pytest.mark.parametrize("update_share", [0.5, 0.8])
def test_a_step_that_keeps_gradients_is_near_the_least_that_it_can_take(update_share: float) -> None:
    """Updates that wait for the end of a backward hide behind the next forward alone, whose units wait for theirs
    (ARCHITECTURE.md). They have to where the norm is to be known, and where parameters that hooks may read lie on the
    device; parameters in RAM are written as gradients come."""
    runs = """
        masters = {"page_size": "64KiB", "offload_optimizer": "host"}
        found["clipped"] = train(AngelPTMStrategy(**masters), gradient_clip_val=0.5)
        found["accumulated"] = train(AngelPTMStrategy(**masters), batches=6, accumulate_grad_batches=2)
        found["looked at"] = train(AngelPTMStrategy(**masters), Looks())
        found["looked at, in RAM"] = train(AngelPTMStrategy(page_size="64KiB", **homes), Looks())
    """
    found = seconds_of(runs, update_share)
    compute_s, forward_s = found["plain"]["step_s"], found["plain"]["forward_s"]
    assert 0.3 < forward_s / compute_s < 0.4
    waits_s = max(forward_s, update_share * compute_s) + compute_s - forward_s
    assert found["clipped"]["step_s"] <= 1.10 * waits_s, found
    assert found["looked at"]["step_s"] <= 1.10 * waits_s, found
    assert found["accumulated"]["step_s"] <= 1.10 * (waits_s + compute_s), found
    assert found["looked at, in RAM"]["step_s"] <= 1.10 * compute_s, found


def seconds_of_ranks(speeds: str, *runs: str, blocks: int = 6) -> dict[str, tuple[float, float]]:
    """Returns the seconds of the forward and of the backward of two tensor ranks, by run."""
    program = str(Path(__file__).with_name("halves_clock_program.py"))
    environment = {"FAKE_CUDA_NO_RACE": "1", "FAKE_CUDA_CLOCK": f"{speeds},launch=0", "BLOCKS": str(blocks)}
    done = ranks_on_fake(program, *runs, limit_s=280, world_size=2, **environment)
    assert [each.returncode for each in done] == [0, 0], [each.stdout[-2000:] + each.stderr[-4000:] for each in done]
    first, second = (json.loads(each.stdout.splitlines()[-1]) for each in done)
    for run in runs:
        assert first[run] == pytest.approx(second[run], rel=1e-6)
    return {run: (forward_s, step_s - forward_s) for run, (forward_s, step_s) in first.items()}


KINDS = ("", "+recomputed")


def alone(blocks: int) -> tuple[dict[str, tuple[float, float]], tuple[float, float]]:
    """Returns the seconds of compute alone, by run, and those of sums alone over a link of 1 MB/s."""
    runs = [f"blocking{kind}" for kind in KINDS]
    compute = seconds_of_ranks("flops=1e9,memory=1e15,link=1e18", *runs, blocks=blocks)
    return compute, seconds_of_ranks("flops=1e18,memory=1e18,link=1e6", "blocking", blocks=blocks)["blocking"]


@pytest.mark.parametrize(("blocks", "bars"), [(6, (1.08, 1.06)), (24, (1.04, 1.03))])
def test_sums_as_long_as_the_compute_of_a_forward_are_hidden(blocks: int, bars: tuple[float, float]) -> None:
    """A step takes little more than the longer of all its compute and all its sums, as Oases has it; the first part and the
    last sum of a pass are not hidden, which with more blocks is a smaller part of it."""
    compute, sums = alone(blocks)
    times = sums[0] / compute["blocking"][0]
    link = f"flops=1e9,memory=1e15,link={1e6 * times}"
    found = seconds_of_ranks(link, *(f"halves{kind}" for kind in KINDS), blocks=blocks)
    for kind, bar in zip(KINDS, bars, strict=True):
        longest_s = max(sum(compute[f"blocking{kind}"]), sum(sums) / times)
        assert longest_s <= sum(found[f"halves{kind}"]) <= bar * longest_s, (kind, found, longest_s)


def test_a_unit_is_recomputed_while_the_sums_of_the_unit_behind_it_pass() -> None:
    compute, sums = alone(6)
    times = sum(sums) / (2 * compute["blocking+recomputed"][1])
    found = seconds_of_ranks(f"flops=1e9,memory=1e15,link={1e6 * times}", "halves+recomputed", "halves+recomputed late")
    assert 1.02 < sum(found["halves+recomputed late"]) / sum(found["halves+recomputed"]) < 1.03, found


def test_two_halves_of_a_batch_take_what_takes_longest_in_each_pass() -> None:
    """A backward computes twice as long as a forward, or three times with recomputation, and as many bytes are added up in
    both. So with sums as long as compute over the whole step, sums take longer in the forward, and compute in the backward:
    no order of two passes takes less than the sum of the longer ones, 1.17 times the compute. Beside that, the first part
    and the last sum of a pass are not hidden: 1/24 of it.

    With sums as long as the recomputed backward, a unit that were not recomputed while the sums of the unit behind it pass
    would take 1.10 of the least."""
    compute, sums = alone(6)
    for wanted_s, bars in (
        (sum(compute["blocking"]), (1.06, 1.05)),
        (2 * compute["blocking+recomputed"][1], (1.06, 1.09)),
    ):
        times = sum(sums) / wanted_s
        found = seconds_of_ranks(f"flops=1e9,memory=1e15,link={1e6 * times}", *(f"halves{kind}" for kind in KINDS))
        for kind, bar in zip(KINDS, bars, strict=True):
            passes = zip(compute[f"blocking{kind}"], (each / times for each in sums), strict=True)
            least_s = sum(max(pair) for pair in passes)
            assert least_s <= sum(found[f"halves{kind}"]) <= bar * least_s, (kind, found, least_s)


def test_a_clock_of_unknown_speeds_is_refused() -> None:
    for speeds, told in (("flops", "give it as"), ("speed=1", "has no speed")):
        with pytest.raises(AssertionError, match=told):
            on_clock("import fake_device, torch; torch.ones(1, device='cuda')", speeds)

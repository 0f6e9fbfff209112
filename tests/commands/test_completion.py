"""Completion in bash: the printed script, in a bash."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lightning_ptm.cli import main

ASK = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_lightning_ptm
printf '%s\\n' "${COMPREPLY[@]}"
"""

SETTINGS = "--trainer.strategy.init_args"
HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "script.bash"
    with pytest.MonkeyPatch.context() as patch, open(path, "w") as file:
        patch.setattr("sys.stdout", file)
        main(["--print_completion", "bash"])
    return path


def complete(script: Path, *words: str) -> list[str]:
    """Returns the completions of the last of `words`, which are split as bash splits a command line."""
    asked = ["bash", "--norc", "-uc", ASK, "bash", str(script), "lightning-ptm", *words]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["p"], {"predict", "params", "plan", "probe"}),
        (["fit", "--trainer.max_s"], {"--trainer.max_steps"}),
        (["fit", "--ckpt"], {"--ckpt_path"}),
        (["fit", f"{SETTINGS}.disk"], {f"{SETTINGS}.disk_{each}" for each in ("path", "memory", "tbw")}),
        (["fit", f"{SETTINGS}.checkpoints.state"], {f"{SETTINGS}.checkpoints.state_dict_type"}),
        (["fit", "--trainer.precision", "=", "bf16-"], {"bf16-true", "bf16-mixed"}),
        (["fit", "--trainer.strategy", "=", "angel_ptm_l"], {"angel_ptm_lock_free"}),
        (["fit", f"{SETTINGS}.offload_optimizer", "="], {"auto", "device", "host", "disk"}),
        (["fit", "--config", "gpt_"], {"gpt_lock_free"}),
        (["fit", "--model", "=", "T5Mo"], {"T5MoE"}),
        (["fit", "--trainer.callbacks", "=", "MemoryT"], {"MemoryTimeline"}),
        (["validate", "--model.init_args.wid"], {"--model.init_args.width"}),
        (["plan", "gpt3_17"], {"gpt3_175b"}),
        (["plan", "gpt", "--hardw"], {"--hardware"}),
        (["plan", "gpt", "--hardware", "mi300"], {path.stem for path in HARDWARE.glob("mi300*.yaml")}),
        (["inspect", "--weights-only", "f"], {"false"}),
        (["inspect", "some.ck"], set()),  # readline completes file names
    ],
)  # fmt: skip
def test_what_is_offered(script: Path, words: list[str], offered: set[str]) -> None:
    assert set(complete(script, *words)) == offered


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--print_completion", "fish"])
    assert stop.value.code == 2
    assert "the script is for bash" in capsys.readouterr().err

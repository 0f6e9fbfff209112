"""examples/long_context.py: a Llama is tuned on texts that two ranks divide as on whole ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.harness import run_ranks

pytest.importorskip("transformers")
FILE = Path(__file__).parents[2] / "examples" / "long_context.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("long_context_example", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tune(model: str, output: str, ranks: int) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    options = ["--context", str(ranks), "--tokens", "64", "--output", output, "--precision", "64-true"]
    example().main([model, *options])


def test_the_tuned_model_is_that_of_one_rank(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = example().make_model(tmp_path / "model")
    found = []
    for ranks in (1, 2):
        output = tmp_path / f"on_{ranks}"
        run_ranks(tune, ranks, model, str(output), ranks)
        found.append(load_file(output / "model.safetensors"))
    before, (one, two) = load_file(tmp_path / "model" / "model.safetensors"), found
    assert one.keys() == two.keys() == before.keys()
    for name, value in one.items():
        assert not torch.equal(value, before[name]), name
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")

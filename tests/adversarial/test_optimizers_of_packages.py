"""The table of docs/optimizers.md: each class trains bit for bit as without the strategy, as an optimizer of its kind, or is
refused in pages."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from kit.judged import Judged, MakeStrategy, assert_alike, run

from lightning_ptm.errors import ConfigError
from lightning_ptm.update.trial.probe import probe

DOC = Path(__file__).parents[2] / "docs" / "optimizers.md"
ROW = re.compile(r"^\| `([\w.]+)` \| (element-wise|whole|unpaged only) \| (.+) \|$", re.MULTILINE)


def rows() -> list[Any]:
    found = []
    for package, kind, classes in ROW.findall(DOC.read_text(encoding="utf-8")):
        names = [name.strip() for name in re.sub(r"\(.*?\)", "", classes).replace(";", ",").split(",")]
        # torch's own are known, and others tests train them.
        marks = [] if package == "torch.optim" and kind == "whole" else [pytest.mark.slow]
        found += [pytest.param(package, kind, name, marks=marks, id=f"{package}.{name}") for name in names]
    return found


def made_by(package: str, name: str, kind: str) -> type[Judged]:
    cls = getattr(pytest.importorskip(package), name, None)
    if cls is None:
        pytest.skip(f"this version of {package} has no {name}")

    class Trained(Judged):
        def configure_optimizers(self) -> Any:
            if (package, name) == ("torch.optim", "Muon"):
                for parameter in self.parameters():
                    parameter.requires_grad_(parameter.dim() == 2)
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            options: dict[str, Any] = {}
            if package.startswith("transformers"):
                options = {"relative_step": False, "scale_parameter": False}
            elif package.startswith("bitsandbytes"):
                options = {"momentum": 0.9} if name.startswith(("SGD", "LARS")) else {}
                options |= {"min_8bit_size": 0} if name.endswith("8bit") and kind == "whole" else {}
            elif cls.__module__.startswith("torch.") and "fused" in inspect.signature(cls.__init__).parameters:
                options = {"fused": True}  # as pages are updated
            return cls(trained, lr=1e-3, **options)

    return Trained


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "kind", "name"), rows())
def test_each_class_is_of_the_kind_that_the_table_has(
    package: str, kind: str, name: str, strategy_at: MakeStrategy
) -> None:
    build = made_by(package, name, kind)
    if kind == "unpaged only":
        with pytest.raises(ConfigError):
            run(build, strategy_at("masters_on_disk"))
        return
    assert bool(probe(build().configure_optimizers()).whole) is (kind == "whole")
    assert_alike(run(build, strategy_at("masters_on_disk")), run(build, None))

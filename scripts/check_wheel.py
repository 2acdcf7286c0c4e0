"""Run by check_wheel.sh in an environment that has PyTorch and this package's wheel only."""

import importlib.resources
import importlib.util
import sys
from pathlib import Path

import torch

loaded_by_torch = set(sys.modules)

import titan_muon  # noqa: E402

UNWANTED = ("torchtitan", "triton", "torchao", "torch.distributed.tensor")


def check_environment() -> None:
    for name in ("torchtitan", "triton", "torchao"):
        if importlib.util.find_spec(name) is not None:
            raise SystemExit(f"{name} can be imported here, so this environment proves nothing")
    if not titan_muon.__file__.startswith(sys.prefix):
        raise SystemExit(f"titan_muon came from {titan_muon.__file__}, not from the wheel")


def check_import() -> None:
    found = set(sys.modules) - loaded_by_torch
    unwanted = sorted(n for n in found if n.startswith(UNWANTED))
    if unwanted:
        raise SystemExit(f"import titan_muon also imported {', '.join(unwanted)}")
    if not importlib.resources.files("titan_muon").joinpath("py.typed").is_file():
        raise SystemExit("the wheel lacks titan_muon/py.typed")


def check_recipes() -> None:
    # A recipe that is not there is no error, since a registered algorithm need not have one.
    from titan_muon.integration.toml_optimizer import recipe_names

    wanted = sorted(path.stem for path in (Path(__file__).parents[1] / "configs").glob("*.toml"))
    if recipe_names() != wanted:
        raise SystemExit(f"the wheel has the recipes {recipe_names()}, not {wanted}")


def check_step() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, bias=False)
    before = model.weight.detach().clone()
    optimizer = titan_muon.Muon(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    if torch.equal(before, model.weight):
        raise SystemExit("a Muon step left the weights unchanged")


if __name__ == "__main__":
    check_environment()
    check_import()
    check_recipes()
    check_step()
    version, torch_version = titan_muon.__version__, torch.__version__
    print(f"wheel: titan_muon {version} imports and steps with torch {torch_version} alone")

"""The package's layers: who may import whom, read from the source without running it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "titan_muon"
FILES = sorted(PACKAGE.rglob("*.py"))

# Layer -> the layers of this package that it may import besides itself.
ARROWS = {
    "kernels": set(),
    "orthogonalization": {"kernels"},
    # The tables by which pieces move, which kernels read.
    "distributed": {"kernels"},
    "optim": {"orthogonalization", "kernels", "distributed"},
    "integration": {"optim", "orthogonalization", "distributed"},
    "train": {"integration"},
    "cli": {"kernels", "orthogonalization", "distributed", "optim", "integration", "train"},
    # The public names.
    "__init__": {"optim", "functional"},
    "functional": {"distributed", "orthogonalization"},
}
HOSTS = {"integration", "train", "cli"}
# Packages that only these layers may name, at any level.
RESERVED = {
    "torchtitan": HOSTS,
    "tyro": HOSTS,
    "tomli": HOSTS,
    "triton": {"kernels"},
    "torchao": {"optim", "integration"},
}
# Modules whose import at module level is work that a user may never need.
LAZY = ("torchao", "torch.distributed.tensor", "torch._inductor", "torch._dynamo")


def layer_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(tree: ast.Module, *, type_checking: bool = False) -> list[tuple[str, bool]]:
    """Return (module, at module level) of every import; those for type checkers only if asked."""
    found = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            if not type_checking:
                return
            top = False
        if isinstance(node, ast.Import):
            found.extend((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from titan_muon import optim` names a layer by what it takes.
            found.extend((f"{node.module}.{alias.name}", top) for alias in node.names)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            top = False
        for child in ast.iter_child_nodes(node):
            visit(child, top)

    visit(tree, True)
    return found


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def faults(file: Path, tree: ast.Module) -> list[str]:
    """Return what a file imports against the rules, one line each."""
    layer = layer_of(file)
    result = []
    for module, top in imports_of(tree, type_checking=True):
        parts = module.split(".")
        if parts[0] == "titan_muon" and len(parts) > 1 and parts[1] in ARROWS:
            if parts[1] not in ARROWS[layer] | {layer}:
                result.append(f"{layer} imports {module}")
        for package, layers in RESERVED.items():
            if within(module, package) and layer not in layers:
                result.append(f"{layer} imports {module}")
        if layer in ("kernels", "orthogonalization") and within(module, "torch.distributed"):
            result.append(f"{layer} imports {module}")
        if top and layer not in HOSTS and any(within(module, lazy) for lazy in LAZY):
            result.append(f"{layer} imports {module} at module level")
        # A kernel needs triton where it is defined; such files are themselves imported late.
        kernel = layer == "kernels" and file.name.startswith("triton_")
        if top and not kernel:
            if within(module, "triton") or "kernels.triton_" in module:
                result.append(f"{layer} imports {module} at module level")
    return sorted(set(result))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_arrows(file):
    assert layer_of(file) in ARROWS
    assert faults(file, parsed(file)) == []


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("kernels", "import torchtitan"),
        ("kernels", "from titan_muon import optim"),
        ("kernels", "import triton.language as tl"),
        ("kernels", "from titan_muon.kernels.triton_tiles import load"),
        ("kernels", "from titan_muon.kernels import triton_tiles"),
        ("kernels", "def f():\n    from torch.distributed.tensor import DTensor"),
        ("orthogonalization", "from titan_muon.distributed.layout import layout_of"),
        ("orthogonalization", "def f():\n    import triton"),
        ("distributed", "from titan_muon.optim.muon import Muon"),
        ("distributed", "from titan_muon.orthogonalization import resolve_schedule"),
        ("distributed", "from torch.distributed.tensor import DTensor"),
        ("optim", "def f():\n    from titan_muon.integration import data"),
        ("optim", "def f():\n    from torchtitan.config import ConfigManager"),
        ("optim", "if TYPE_CHECKING:\n    from torchtitan.config import ConfigManager"),
        ("optim", "import torchao.optim"),
        ("integration", "import titan_muon.train"),
        ("train", "import titan_muon.cli.plan"),
    ],
)
def test_arrows_are_enforced(layer, source):
    """The rules above must be able to fail."""
    assert len(faults(PACKAGE / layer / "x.py", ast.parse(source))) >= 1


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("kernels", "def f():\n    import triton"),
        ("distributed", "def f():\n    from torch.distributed.tensor import DTensor"),
        ("distributed", "if TYPE_CHECKING:\n    from torch.distributed.tensor import DTensor"),
        ("optim", "from titan_muon.distributed.layout import layout_of"),
        ("integration", "from torchtitan.config import ConfigManager"),
    ],
)
def test_what_the_rules_allow(layer, source):
    assert faults(PACKAGE / layer / "x.py", ast.parse(source)) == []


def test_layers_are_the_folders():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders <= set(ARROWS)


def test_cpu_runtime_is_imported_by_functions_only():
    """The GPU path must never load it."""
    for file in FILES:
        if file.stem.startswith("cpu_"):
            continue
        for module, top in imports_of(parsed(file)):
            if ".cpu_" in module:
                assert not top, f"{file.name} imports {module} at module level"
                assert layer_of(file) in ("train", "cli"), f"{file.name} imports {module}"

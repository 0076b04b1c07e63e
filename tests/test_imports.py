"""The house: imports follow the arrow from spec to samples and never run back (docs/design.md)."""

import ast
import functools
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "ddpm_ds"

# A room may import from the rooms before it and from itself.
ROOMS = (
    *("ground", "schema", "unet", "data", "diffusion", "config", "checkpoint", "pipeline", "processes", "observe"),
    *("tracking", "planning", "training", "evaluate", "experiments", "cli"),
)

HEAVY = {"torch", "numpy", "deepspeed", "mlflow"}

# What a room, or a file of one, may not import from outside, wherever in a file.
LIGHT = (
    *(f"ground.{name}" for name in ("errors", "files", "secret", "formats", "host", "options", "outputs", "units")),
    *(f"processes.{name}" for name in ("hosts", "ranks", "signals", "supervisor")),
    *("schema", "config", "data.spec", "unet.spec", "diffusion.spec"),
)
NOT_IN = dict.fromkeys(LIGHT, HEAVY) | {
    "ground": {"deepspeed", "mlflow"},
    "ground.device": {"numpy"},
    "ground.cuda_graphs": {"numpy"},
    "processes": {"mlflow", "numpy"},
    "data": {"deepspeed", "mlflow"},
    "diffusion": {"deepspeed", "mlflow"},
    "unet": {"deepspeed", "mlflow", "diffusers"},
    "checkpoint": {"deepspeed", "mlflow"},
    "pipeline": {"mlflow"},
}


def room_of(module: str) -> str:
    return module.split(".")[1]


def modules() -> list[str]:
    paths = (path.relative_to(REPOSITORY).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths if path != Path("ddpm_ds/__init__"))


@functools.cache
def imported(module: str) -> list[str]:
    """Every module that a module imports, also inside functions."""
    found: list[str] = []
    path = REPOSITORY / Path(*module.split("."))
    path = package if (package := path / "__init__.py").is_file() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; write the whole name"
            base = node.module or ""
            found += [f"{base}.{alias.name}" for alias in node.names] if base == "ddpm_ds" else [base]
    return found


@pytest.mark.parametrize("module", modules())
def test_imports_never_run_back(module: str) -> None:
    own = ROOMS.index(room_of(module))
    backwards = [
        name
        for name in imported(module)
        if name.startswith("ddpm_ds.") and ROOMS.index(room_of(name)) > own and room_of(name) != room_of(module)
    ]
    assert backwards == []


@pytest.mark.parametrize("module", modules())
def test_a_room_imports_only_what_it_may_know(module: str) -> None:
    forbidden = NOT_IN.get(room_of(module), set()) | NOT_IN.get(module.removeprefix("ddpm_ds."), set())
    assert {name.split(".")[0] for name in imported(module)} & forbidden == set()

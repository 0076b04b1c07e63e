"""Train diffusion U-Nets, of pixels or latents, on DeepSpeed's pipeline engine, from a laptop CPU to many nodes.

The Python interface for scripts; ``docs/python.md`` has examples::

    load_spec     read a run spec
    plan          predict the fastest ways to lay a run out on some devices
    train         train in child processes, as ddpm-ds train does
    open_run      read a run's folder: spec, metrics, checkpoints, verdict
    load_trained  load weights into a plain U-Net
    sample        draw images from them
    SamplerSpec   settings of a sampler
    UserError     raised for bad input

A name is imported when it is first used, so ``import ddpm_ds`` brings no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ddpm_ds.ground.version import __version__ as __version__

__all__ = ["SamplerSpec", "UserError", "load_spec", "load_trained", "open_run", "plan", "sample", "train"]

if TYPE_CHECKING:
    from ddpm_ds.config.spec_file import load_spec
    from ddpm_ds.diffusion.spec import SamplerSpec
    from ddpm_ds.evaluate.sampling import sample
    from ddpm_ds.evaluate.trained import load_trained
    from ddpm_ds.ground.errors import UserError
    from ddpm_ds.planning.run_plan import plan
    from ddpm_ds.tracking.runs import open_run
    from ddpm_ds.training.from_python import train
else:  # hidden from type checkers: seeing __getattr__, they would accept every name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        if not isinstance(found, type):
            found = import_module(f"{__name__}.schema.section").checked(found)
        return globals().setdefault(name, found)


_MODULES = {
    "SamplerSpec": "diffusion.spec",
    "UserError": "ground.errors",
    "load_spec": "config.spec_file",
    "load_trained": "evaluate.trained",
    "open_run": "tracking.runs",
    "plan": "planning.run_plan",
    "sample": "evaluate.sampling",
    "train": "training.from_python",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Small jobs to plan for."""

from dataclasses import replace
from typing import Any

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.planning.inputs import Machine, Workload, machine
from ddpm_ds.planning.predictor import Predictor
from tests.ds_json import config_of
from tests.launching import tiny_spec

ADAMW = {"type": "AdamW", "params": {"torch_adam": True}}
EIGHT_BIT = {"type": "AdamW8bit", "params": {}}
FUSED = {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}


def field_spec(size: object, channels: int, unet: dict[str, Any]) -> RunSpec:
    """A U-Net that trains on one field a step, of some size and number of channels."""
    data = {"source": "arrays", "path": "fields.npz", "values": "float32", "image_size": size, "channels": channels}
    return tiny_spec(
        data=data | {"horizontal_flips": False},
        unet=unet | {"attention_resolutions": [], "dropout": 0.0, "norm_groups": 32, "classes": None},
        train={"batch_images": 1, "label_drop": 0.0},
        sampler={"clip": "none"},
        samples={"count": 1},
    )


def small_job(spec: RunSpec | None = None, *, on_cpu: bool = False, **config: Any) -> Workload:
    """A job of the tiny U-Net, or of ``spec``, with a DeepSpeed JSON of these blocks."""
    return Workload(spec or tiny_spec(), config_of(**{"optimizer": ADAMW, **config}), on_cpu)


def small_machine(devices: int, *, kind: str = "l4", nodes: int = 1, **rates: Any) -> Machine:
    """Devices of a kind, of which some rates are given; the layers of a GPU take 0.1 ms to start."""
    rates = {"layer_seconds": 1e-4, "launch_seconds": 0.0, **rates} if kind != "cpu" else rates
    return replace(machine(kind, half=False, devices=devices, nodes=nodes), **rates)


def small_predictor(devices: int, job: Workload | None = None, **rates: Any) -> Predictor:
    return Predictor(job or small_job(), small_machine(devices, **rates))

"""What is to be trained, as far as a plan depends on it: layers, batch, precision and what the DeepSpeed JSON says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddpm_ds.config.ds_config import BUCKET_ELEMENTS, ELEMENT_BYTES, check_ds_config, enabled
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.device import DTYPES
from ddpm_ds.unet.layers import Layer, unet_layers
from ddpm_ds.unet.operations import arithmetic_dtype


@dataclass(frozen=True)
class Workload:
    """A run without its layout."""

    spec: RunSpec
    config: dict[str, Any]
    """The DeepSpeed JSON as given; what a plan decides is replaced in it."""
    config_path: Path
    layers: tuple[Layer, ...]
    precision: Literal["fp32", "fp16", "bf16"]

    @property
    def stored_bytes(self) -> int:
        """Bytes of a weight, of an element on the wire between stages and of a gradient."""
        return ELEMENT_BYTES[self.precision]

    def arithmetic_bytes(self, on_cpu: bool) -> int:
        """Bytes of an activation; of a CPU, of one like this machine's."""
        return arithmetic_dtype("cpu" if on_cpu else "cuda", DTYPES[self.precision][1]).itemsize

    @property
    def accumulated_bytes(self) -> int:
        """Bytes of an element in which ZeRO adds up the gradients of micro-batches."""
        wide = self.config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
        return 4 if wide else self.stored_bytes

    @property
    def bucket_elements(self) -> int:
        """Gradients that ZeRO reduces at a time."""
        given = self.config.get("zero_optimization", {}).get("reduce_bucket_size", "auto")
        return BUCKET_ELEMENTS if given == "auto" else int(given)


def job(spec: RunSpec, config: dict[str, Any], config_path: Path) -> Workload:
    """The job of a spec and a DeepSpeed JSON.

    Raises:
        DsConfigError: the JSON has a wrong key or value.
    """
    check_ds_config(config, config_path)
    return Workload(
        spec=spec,
        config=config,
        config_path=config_path,
        layers=unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size),
        precision="fp16" if enabled(config, "fp16") else "bf16" if enabled(config, "bf16") else "fp32",
    )

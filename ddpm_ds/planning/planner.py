"""The planner in one call, for scripts and ``ddpm-ds plan``. PyTorch and DeepSpeed are imported when it is called."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpm_ds.command_line import MOST_BANDWIDTH, MOST_BYTES, MOST_COUNT, MOST_FLOPS, MOST_PROCESSES
from ddpm_ds.config.ds_config import check_ds_config, precision, read_ds_config
from ddpm_ds.config.spec import GivenPath, RunSpec
from ddpm_ds.errors import LayoutError
from ddpm_ds.predict.layouts import KINDS, Machine, Workload, kind_of, machine

if TYPE_CHECKING:
    from ddpm_ds.observe.device_speed import LayerTimes
    from ddpm_ds.predict.decisions import Plan

Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
Bandwidth = Annotated[float, Field(ge=1.0, le=MOST_BANDWIDTH)]


def plan(
    spec: RunSpec,
    ds_config: GivenPath,
    overrides: Sequence[str] = (),
    *,
    processes: Processes,
    nodes: Processes = 1,
    device_kind: str | None = None,
    device_memory: Annotated[int, Field(ge=1, le=MOST_BYTES)] | None = None,
    flops: Annotated[float, Field(ge=1.0, le=MOST_FLOPS)] | None = None,
    link_bandwidth: Bandwidth | None = None,
    network_bandwidth: Bandwidth | None = None,
    times: Callable[[Workload, Machine], LayerTimes] | None = None,
    top: Annotated[int, Field(ge=1, le=MOST_COUNT)] = 10,
) -> Plan:
    """Return the ``top`` fastest layouts of a run on ``processes`` devices, with the memory and time of each.

    ``ds_config`` is the path of a DeepSpeed JSON; overrides of the form ``ds.block.key=value`` change it. Devices are
    like this machine's, or of a kind in :data:`ddpm_ds.predict.layouts.KINDS`. Given values replace the data sheet's:
    ``device_memory`` in bytes of one device, ``flops`` per second, and in bytes per second ``link_bandwidth`` between
    devices of a node and ``network_bandwidth`` between nodes. ``times`` times the layers of layouts that fit; without
    it times are computed. Nothing is trained, and no other process is needed.

    Raises:
        DsConfigError: the JSON can't be read, or training would refuse it.
        LayoutError: no layout divides devices, layers and batch, or none fits; or the devices are unknown.
    """
    config = read_ds_config(ds_config, overrides)
    check_ds_config(config, ds_config, spec)
    if device_kind is None:
        from ddpm_ds.device import described

        name, here = described(processes // nodes or 1)
        device_kind, device_memory = kind_of(name), device_memory or here
    if device_kind is None:
        raise LayoutError(f"this machine's GPU is not in the planner's table; use --device-kind {' or '.join(KINDS)}")
    devices = machine(device_kind, half=precision(config) != "fp32", devices=processes, nodes=nodes)
    rates = {"flops": flops, "link_bandwidth": link_bandwidth, "network_bandwidth": network_bandwidth}
    given: dict[str, Any] = {"memory_bytes": device_memory, **rates}
    devices = replace(devices, **{name: value for name, value in given.items() if value is not None})
    with _without_accelerator():
        from ddpm_ds.predict.decisions import candidates, search, sort_out
        from ddpm_ds.predict.predictor import Predictor

    job = Workload(spec, config, devices.is_cpu)
    predictor = Predictor(job, devices)
    among = candidates(predictor, ds_config)
    if times is not None and (fitting := sort_out(predictor, among)[0]):  # only layouts that fit are timed
        among, predictor = fitting, Predictor(job, devices, times(job, devices))
    return search(predictor, top, among)


@contextlib.contextmanager
def _without_accelerator() -> Iterator[None]:
    """Keep DeepSpeed from looking for devices during its import; the caller's later work may use them."""
    given = os.environ.get("DS_ACCELERATOR")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        yield
    finally:
        if given is None:
            del os.environ["DS_ACCELERATOR"]

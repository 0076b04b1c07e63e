"""From files and options to a plan: layout and cuts, all that can be checked before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddpm_ds.config.ds_config import check_ds_config, leaves_stages_open, read_ds_config, resolve
from ddpm_ds.config.spec import ALL_SIGMAS
from ddpm_ds.config.spec_file import load_spec, spec_overrides
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.planning.run_plan import RunPlan
from ddpm_ds.unet.layers import unet_layers


def plan_run(
    spec_path: Path,
    overrides: Sequence[str],
    ds_path: Path,
    *,
    world_size: int,
    stages: int | None,
    device: str = "auto",
    hosts: Sequence[str] | None = None,
) -> RunPlan:
    """Read and check everything that can be checked before anything is started.

    Overrides that begin with ``ds.`` change the JSON, others the spec. If neither ``stages`` nor the JSON gives the
    number of stages, the planner chooses it for ``device`` (as in ``--device``), and only then imports PyTorch and
    DeepSpeed. ``hosts`` gives each rank's host (:func:`ddpm_ds.pipeline.placement.launched_hosts`), by default a single
    one.

    Raises:
        SpecError, DsConfigError, LayoutError: one line each, before anything is started.
    """
    spec = load_spec(spec_path, spec_overrides(overrides))
    if spec.sampler.guidance_between != ALL_SIGMAS:
        from ddpm_ds.diffusion.levels import check_guidance  # it imports PyTorch

        check_guidance(spec.sampler, spec.diffusion)
    config, chosen = read_ds_config(ds_path, overrides), None
    names = ("0",) * world_size if hosts is None else tuple(hosts)
    if stages is None:
        check_ds_config(config, ds_path, spec)
        if leaves_stages_open(config, world_size):
            from ddpm_ds.device import choose_device

            choose_device(device)  # before DeepSpeed, whose schedules the planner simulates, is imported
            from ddpm_ds.planning.decide import stages_here

            stages, chosen = stages_here(spec, config, ds_path, world_size=world_size, hosts=names)
    ds = resolve(config, spec, world_size=world_size, stages=stages, path=ds_path)
    layers = unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size)
    bounds = partition(layers, ds.layout.stages, ds.planned_partition, ds.layout.schedule)
    return RunPlan(spec, spec_path, ds, ds_path, layers, bounds, names, chosen=chosen)

"""A plan in words and tables: what every run prints first, and what its start has decided since."""

import os
from collections import Counter
from pathlib import Path

from ddpm_ds.command_line import aligned, counted
from ddpm_ds.config.ds_config import ELEMENT_BYTES, AcrossHosts
from ddpm_ds.config.spec import HELD_OUT_QUANTILES
from ddpm_ds.pipeline.cuts import folds, relayed_elements
from ddpm_ds.pipeline.placement import traffic
from ddpm_ds.planning import RunPlan
from ddpm_ds.secret import public_address
from ddpm_ds.unet.layers import PASSES_PER_STEP
from ddpm_ds.unet.shards import is_asked

MOST_HOSTS = 3
"""Maximum hosts named in a cell of the table of stages."""
MOST_WHOLE = 3
"""Maximum layers named in a line that stay whole for the same reason."""


def stage_table(plan: RunPlan) -> str:
    """Return the stages as a table: layers, parameters, forward flops, bytes sent per step."""
    header = ["stage", "layers", "first", "last", "parameters", "forward GFLOP/image", "share", "sent MB/step"]
    grid, layout = plan.grid() if plan.several_hosts else None, plan.ds.layout
    rows = [[*header, "host"] if grid else header]
    for stage in plan.stages:
        sent = stage.sent_elements * layout.batch_images // layout.replicas * ELEMENT_BYTES[plan.ds.precision]
        row = [
            f"{stage.index} on rank {stage.rank}" if folds(plan.ds.layout.schedule) else str(stage.index),
            str(stage.layers),
            stage.first_layer,
            stage.last_layer,
            f"{stage.parameters:,}",
            f"{stage.forward_flops / 1e9:.4f}",
            f"{stage.forward_flops / (2 * plan.macs):.1%}",
            f"{sent / 1e6:.2f}",
        ]
        if grid:
            names = list(dict.fromkeys(map(str, grid.hosts_of(stage.rank))))
            few = len(names) <= MOST_HOSTS
            row.append(", ".join(names) if few else f"{names[0]} ... {names[-1]} ({len(names)})")
        rows.append(row)
    return "\n".join(aligned(rows, left={2, 3, len(header)}))


def messages_line(plan: RunPlan) -> str:
    """Return a line on the bytes between stages, beside those of a relay."""
    layout, spec = plan.ds.layout, plan.spec
    size = layout.batch_images // layout.replicas * ELEMENT_BYTES[plan.ds.precision]
    sent, relayed = sum(stage.sent_elements for stage in plan.stages), relayed_elements(plan.layers, layout.stages)
    what = "all skips and the text" if spec.unet.text else "all skips"
    return (
        f"messages     {_megabytes(size * sent)} a step and direction between stages, {sent / relayed:.1%} of the "
        f"{_megabytes(size * relayed)} of a relay of {what}"
    )


def decided_since(planned: RunPlan, decided: RunPlan) -> str:
    """Return in words and a table what the start of a run has decided; empty if all was said before."""
    said, line = [], hosts_line(decided)
    if line is not None and line != hosts_line(planned):
        said.append(line)
    if (warning := hosts_warning(decided)) != hosts_warning(planned):
        said += warning
    if decided.ds.partition == "measured" and decided.ds.layout.stages > 1:
        said.append(f"\ncut by the layers' times on this device\n{stage_table(decided)}")
    return "\n".join(said)


def hosts_line(plan: RunPlan) -> str | None:
    """Return a line on the bytes that cross hosts in a step, for both axes across hosts; None for one host."""
    if not plan.hosts:
        return "hosts        of different sizes: placement and traffic are known once the ranks have met"
    if not plan.several_hosts:
        return None
    sizes, wires = list(Counter(plan.hosts).values()), traffic(plan.grid(), plan.exchange)
    equal = len(set(sizes)) == 1
    each = f"{len(sizes)} x {counted(sizes[0], 'process')}" if equal else f"{' + '.join(map(str, sizes))} processes"
    kinds = (("activations", wires.activations), ("gradients", wires.gradients), ("weights", wires.weights))
    named = [f"{_megabytes(size)} of {name}" for name, size in kinds if size]
    if not named:  # of one tensor group, hosts_warning says what it sends
        return None
    whole = f"{_megabytes(wires.between_hosts)} a step, {' and '.join(named)}," if named[1:] else f"{named[0]} a step"
    most = f"{'each' if len(set(wires.sent.values())) == 1 else 'the busiest'} sends {_megabytes(wires.busiest)}"
    line = f"hosts        {each}, {plan.across} across hosts: {whole} between them, {most}"
    if min(plan.ds.layout.stages, plan.ds.layout.replicas) == 1:
        return line
    other: AcrossHosts = "replicas" if plan.across == "stages" else "stages"
    return f"{line}; {other} across would be {_megabytes(traffic(plan.grid(other), plan.exchange).between_hosts)}"


def tensor_lines(plan: RunPlan) -> list[str]:
    """Return lines on the layers that tensor groups split, those that stay whole, and what the sums cost; none without
    tensor groups.
    """
    tensor = plan.ds.layout.tensor
    if tensor.size == 1:
        return []
    split = sum(layer.shards > 1 for layer in plan.layers)
    groups = plan.ds.layout.world_size // tensor.size
    sent = max(plan.exchange.sums)
    whole: dict[str, list[str]] = {}
    for layer in plan.layers:
        if layer.shards == 1 and layer.unit and is_asked(layer, plan.layers, tensor):
            whole.setdefault(counted(layer.units, layer.unit), []).append(layer.name)
    stay = [f"{_few(names)} {'stay' if names[1:] else 'stays'} whole: {reason}" for reason, names in whole.items()]
    said = [f"{split} of {len(plan.layers)} layers split", *stay]
    cost = f"a rank sends {_megabytes(sent)} a step to sum their parts"
    return [
        f"tensor       {counted(groups, 'group')} of {tensor.size} ranks, {'; '.join(said)}; {cost}",
        *hosts_warning(plan),
    ]


def _few(names: list[str]) -> str:
    """Return the first names of some layers, and how many there are."""
    if len(names) <= MOST_WHOLE:
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{', '.join(names[: MOST_WHOLE - 1])} ... {names[-1]} ({len(names)} layers)"


def hosts_warning(plan: RunPlan) -> list[str]:
    """Return a line on tensor groups across hosts, if there are any."""
    if not plan.several_hosts or not (split := plan.grid().split_groups):
        return []
    size, sent = plan.ds.layout.tensor.size, max(plan.exchange.sums)
    return [
        f"warning      {counted(split, 'tensor group')} across hosts: each rank sends {_megabytes(sent)} a step to sum "
        f"parts of layers, and waits for them; use a pipeline.tensor.size below {size} that divides the processes of a "
        "host"
    ]


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.4g} MB"


def describe_plan(plan: RunPlan, run_dir: Path) -> str:
    """Return the text that every run prints first, and ``--dry-run`` prints alone."""
    spec, data, layout, ds = plan.spec, plan.spec.data, plan.ds.layout, plan.ds
    match ds.layout.checkpoint_interval:
        case "auto":
            recompute = "only if memory is short"
        case 0:
            recompute = "off"
        case interval:
            recompute = f"every {counted(interval, 'layer')}"
    steps = spec.sampler.steps_of(spec.diffusion)
    levels, held_out = len(HELD_OUT_QUANTILES), spec.data.held_out_images
    these = counted(held_out, "held-out image")
    if data.held_out_path is not None:
        these = f"{counted(held_out, 'image') if held_out else 'all images'} of {data.held_out_path}"
    drawn = spec.samples.count * spec.sampler.evaluations_of(spec.diffusion)
    tracker = public_address(os.environ.get("MLFLOW_TRACKING_URI", "")) or run_dir.parent
    lines = [
        f"run          {spec.name}: {plan.spec_path} with {plan.ds_path}",
        f"data         {data.source}, {'x'.join(map(str, (*data.size, data.channels)))}"
        + (f", cropped from {'x'.join(map(str, data.stored_size))}" if data.crop_from else "")
        + (f", latents of {data.autoencoder}" if data.autoencoder else ""),
        f"U-Net        {plan.parameters:,} parameters in {len(plan.layers)} layers, "
        f"{2 * plan.macs / 1e9:.4f} GFLOP forward per image",
        f"precision    {ds.precision}, ZeRO-{ds.layout.zero_stage}, activation checkpointing {recompute}",
        f"layout       {counted(layout.world_size, 'process')}: {layout.processes_words()}"
        f"{f', schedule {ds.layout.schedule}' if layout.stages > 1 else ''}",
        *([plan.chosen.line] if plan.chosen else []),
        *tensor_lines(plan),
        *([messages_line(plan)] if layout.stages > 1 else []),
        *([line] if (line := hosts_line(plan)) else []),
        f"batch        {counted(layout.batch_images, 'image')} = {counted(layout.micro_batches, 'micro-batch')} of "
        f"{layout.micro_batch_images} x {counted(layout.replicas, 'replica')}",
        f"length       {counted(spec.train.images, 'image')} = {counted(plan.steps, 'step')}, "
        f"logged every {counted(spec.logging.log_every_images, 'image')}",
        _regular(
            "samples",
            f"{counted(spec.samples.count, 'image')} by {spec.sampler.kind} in {counted(steps, 'step')}",
            spec.samples.every_images,
            drawn,
        ),
        _regular(
            "validation",
            f"{these} at {levels} noise levels",
            spec.evaluation.every_images,
            held_out * levels if held_out or data.held_out_path is None else None,
        ),
        f"outputs      {run_dir}; MLflow in {tracker}",
        "",
        stage_table(plan),
    ]
    return "\n".join(lines)


def _regular(name: str, what: str, every_images: int | None, forwards: int | None) -> str:
    """Return a line about a regular task, and the compute of its forward passes, if their number is known, relative to
    training.
    """
    if not every_images or forwards == 0:
        return f"{name:<13}off"
    share = "" if forwards is None else f" ({forwards / (PASSES_PER_STEP * every_images):.1%} of the computing)"
    return f"{name:<13}{what}, every {every_images:,} images{share}"

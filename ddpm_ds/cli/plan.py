"""``ddpm-ds plan``, which prints the fastest layouts and why; and the plan that every run prints first."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from ddpm_ds.cli.options import OVERWRITE, ConfigOption, SpecOptions, Verb, take_files
from ddpm_ds.config.spec import HELD_OUT_QUANTILES
from ddpm_ds.config.spec_file import load_spec, spec_overrides
from ddpm_ds.ground.errors import LayoutError, is_out_of_memory
from ddpm_ds.ground.options import flag, link_speed, memory_size, option, positive, process_count, teraflops
from ddpm_ds.ground.outputs import check_outputs, writing
from ddpm_ds.ground.secret import public_address
from ddpm_ds.ground.units import GIB, aligned, counted, gib, rounded, table
from ddpm_ds.pipeline.cuts import folds, relayed_elements
from ddpm_ds.pipeline.placement import Exchange, Grid, traffic
from ddpm_ds.planning import run_plan
from ddpm_ds.planning.inputs import KINDS, NEARLY, TIGHT, Machine, Workload
from ddpm_ds.planning.run_plan import MOST_SWAPPING, USE_REPLICAS, RunDraft
from ddpm_ds.processes.ranks import set_environment
from ddpm_ds.schema.layout import ELEMENT_BYTES, AcrossHosts, Layout
from ddpm_ds.unet.layers import PASSES_PER_STEP, Layer
from ddpm_ds.unet.shards import is_asked, swaps_of, whole_layers

if TYPE_CHECKING:
    from ddpm_ds.observe.device_speed import LayerTimes
    from ddpm_ds.planning.decisions import Plan
    from ddpm_ds.planning.memory import Memory
    from ddpm_ds.planning.predictor import Prediction

MOST_HOSTS = 3
"""Maximum hosts named in a cell of the table of stages."""
WIDTH, NAMED, MOST_RANKS, MOST_STAGES = 100, 13, 10, 16
"""Characters of a line and of the name that begins it; maximum ranks and stages in the tables of memory and stages."""
LEAST = ("GB on wires", "images/s", "GiB/host", "replicas")
LEAST_OF_STAGES = ("forward GFLOP/image", "last")
"""Columns of the two tables that are left out, in this order, until a table is no wider than a line."""
FEWEST_PIXELS = 64 * 64  # below which space groups are slower than one device (docs/space.md)
MOST_WHOLE = 3
"""Maximum names of whole layers that a line gives for one reason."""


@dataclass(frozen=True)
class PlanOptions(ConfigOption, SpecOptions):
    processes: int = option("processes to train with", "N", process_count, required=True)
    nodes: int = option("hosts that share the processes (default 1)", "N", process_count, default=1)
    device_kind: str | None = option("default: this machine's GPU, else cpu", choices=tuple(KINDS))
    device_memory: int | None = option("memory of one device, such as 80GiB", "SIZE", memory_size)
    tflops: float | None = option("TFLOP/s that a device reaches in convolutions", "X", teraflops)
    bandwidth: float | None = option("speed between devices of a node, such as 300GB/s", "Y", link_speed)
    inter_node: float | None = option("speed to another node, such as 200Gbit/s", "Z", link_speed)
    measure: bool = flag("time layers, and a swap of space groups, on this machine; times are cached")
    top: int = option("layouts to print (default 10)", "N", positive, default=10)
    out: Path | None = option("write the DeepSpeed JSON of the first one", "FILE")
    timeline: Path | None = option("draw the step of the first one", "PNG")
    overwrite: bool = flag(OVERWRITE)


@Verb
def plan(options: PlanOptions) -> None:
    """Predict the fastest layout on given devices.

    Predicts each layout's memory, step time, bubble and traffic, and prints the fastest that fit. Nothing is trained: a
    simulator executes the engine's programs (docs/planner.md).

      ddpm-ds plan --spec cifar10 --deepspeed_config ds_configs/zero0_fp32.json --processes 2 --measure
          time each layer on this machine instead of computing its cost
      ddpm-ds plan --spec folder --set data.path=photos --deepspeed_config ds_configs/zero2_bf16.json \\
          --processes 16 --nodes 2 --device-kind a100-40 --inter-node 12.5GB/s --out plan.json --timeline plan.png
          two nodes of A100s, which need not be here; write the JSON to train with and draw the step
    """
    files = take_files(options)
    check_outputs(overwrite=options.overwrite, out=options.out, timeline=options.timeline)
    spec = load_spec(files.spec, spec_overrides(files.overrides), reads_data=False)
    if options.measure and options.tflops:
        raise LayoutError("--tflops has no effect on layers that --measure times; leave one of them out")
    set_environment()
    if options.measure and options.processes > 1:
        from ddpm_ds.ground.device import choose_device, described
        from ddpm_ds.observe.device_speed import measure_swap

        device = choose_device("cpu" if options.device_kind == "cpu" else "auto")
        measure_swap(described(1)[0], device)  # which space groups wait for
    on = options.device_kind or "devices like this machine's"
    print(f"planning {spec.name} for {counted(options.processes, 'process')} on {on}", file=sys.stderr, flush=True)
    with tqdm(desc="timing layers", unit=" layers", leave=False, disable=None if options.measure else True) as bar:
        found = run_plan.plan(
            spec,
            files.deepspeed_config,
            files.overrides,
            processes=options.processes,
            nodes=options.nodes,
            device_kind=options.device_kind,
            device_memory=options.device_memory,
            flops=options.tflops,
            link_bandwidth=options.bandwidth,
            network_bandwidth=options.inter_node,
            times=partial(_measured, bar) if options.measure else None,
            top=options.top,
        )
    job, devices = found.predictor.job, found.predictor.machine
    timed = "timed on this machine" if options.measure else "computed, not timed (--measure times them)"
    print(f"U-Net    {spec.name}: {_parameters(job.layers)}, {job.precision}, {spec.train.batch_images} images a step")
    line = textwrap.fill(f"devices  {devices.words()}", WIDTH, subsequent_indent=" " * 9)
    print(f"{line}\nlayers   {timed}\n\n{report(found)}")
    if options.out is not None:
        with writing(options.out, overwrite=options.overwrite) as file:
            file.write(f"{json.dumps(found.ds_config(), indent=2)}\n".encode())
        where = ["--processes", str(options.processes)] if options.nodes == 1 else ["--hostfile", "hostfile"]
        command = ["ddpm-ds", "train", *where, "--deepspeed_config", str(options.out), "--spec", str(files.spec)]
        command += [word for change in spec_overrides(files.overrides) for word in ("--set", change)]
        print(f"\ntrain with 1: {shlex.join(command)}")
    if options.timeline is not None:
        _draw(found, spec.name, options.timeline, overwrite=options.overwrite)


def _parameters(layers: Sequence[Layer]) -> str:
    """Return words on the number of parameters, and on the trained ones if some are frozen."""
    layers = whole_layers(layers)
    total, trained = (sum(getattr(layer, what) for layer in layers) for what in ("parameters", "trained"))
    return f"{total:,} parameters{f' ({trained:,} trained)' if trained < total else ''}"


def _draw(found: Plan, name: str, path: Path, *, overwrite: bool) -> None:
    if (first := found.best[0].layout).stages == 1:
        print(f"{path}: not drawn, since layout 1 has one stage, which waits for no other")
        return
    from ddpm_ds.observe.timeline import draw_step

    step = found.predictor.simulate(first, keep_events=True)
    title = f"{name}: {first.words()}\n{rounded(1e3 * step.step_seconds, 4)} ms, bubble {step.bubble:.1%}"
    with writing(path, overwrite=overwrite) as file:
        draw_step(step.events, step.step_seconds, list(map(str, range(len(step.events)))), title, file)
    print(f"{path}: the step of 1")


def _measured(bar: tqdm[NoReturn], job: Workload, devices: Machine) -> LayerTimes:
    """Return the times of layers on this machine; ``bar`` counts the timed ones."""
    import torch

    from ddpm_ds.ground.device import choose_device
    from ddpm_ds.observe.device_speed import LayerSeconds, measured_times

    device = choose_device("cpu" if devices.is_cpu else "cuda")
    if devices.is_cpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // devices.devices_per_node))

    def progress(layer: Layer, images: int) -> None:
        bar.set_postfix_str(f"{layer.name}, {counted(images, 'image')}", refresh=False)
        bar.update()

    measure = measured_times(device, job.precision, progress)

    def times(layers: Sequence[Layer], images: int) -> Sequence[LayerSeconds]:
        try:
            return measure(layers, images)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise LayoutError(
                f"--measure ran out of memory with a layer and {counted(images, 'image')}; free the device's memory or "
                "use a smaller --device-memory"
            ) from None

    return times


def report(found: Plan) -> str:
    """Return the tables and sentences that ``ddpm-ds plan`` prints."""
    machine = found.predictor.machine
    layouts, memory = _layout_table(found.best, machine), _memory_table(found.best[0].memory)
    few = f"; the {MOST_RANKS} fullest ranks" if len(found.best[0].memory) > MOST_RANKS else ""
    fits = f"memory of 1, MiB per device (fits up to {machine.usable_bytes / 2**20:,.0f}{few})"
    return "\n".join([*layouts, "", fits, *memory, "", textwrap.fill(why(found), WIDTH, break_on_hyphens=False)])


def why(found: Plan) -> str:
    """Return sentences on why the first layout is the fastest, on traffic between nodes, and on more memory."""
    machine, (first, *others) = found.predictor.machine, found.best
    beaten = any(other.step_seconds < first.step_seconds for other in others)
    is_first = f"needs least memory within {NEARLY:.0%} of the fastest of" if beaten else "is the fastest of"
    sentences = [
        f"1 {is_first} {counted(found.fitting, 'layout')} that fit; {found.misfits:,} don't. Its devices spend "
        f"{first.pass_seconds / first.step_seconds:.0%} of the step in forwards and backwards, "
        f"{first.update_seconds / first.step_seconds:.0%} on gradients and weights and wait for {first.bubble:.0%}."
    ]
    pipeline = (first.layout.stages, first.layout.schedule)
    differing = [other for other in others if (other.layout.stages, other.layout.schedule) != pipeline]
    for other in (differing or others)[:1]:
        longer, more = other.step_seconds / first.step_seconds - 1, other.peak.total - first.peak.total
        by = f"longer: {_difference(first, other)}" if longer >= 0 else f"less, and needs {gib(more)} more"
        sentences.append(f"{found.best.index(other) + 1} ({other.layout.words()}) takes {abs(longer):.1%} {by}.")
    sentences += [_of_groups(first, best, machine) for best in (found.in_groups, found.in_space) if best is not None]
    if all(one.layout.space.size > 1 for one in found.best):
        sentences.append(f"One image does not fit: {first.layout.space.size} ranks share it.")
    sentences += found.lacking
    if machine.nodes > 1:
        sentences.append(_bytes_between_nodes(first, found.other_axis))
    if (misfit := found.fastest_misfit) is not None:
        memory = misfit.peak
        largest = max(memory.parts, key=lambda name: memory.parts[name])
        sentences.append(
            f"{misfit.layout.words()} would take {1 - misfit.step_seconds / first.step_seconds:.1%} less, but is "
            f"{gib(memory.total - machine.usable_bytes)} over on rank {misfit.memory.index(memory)} "
            f"({largest} {gib(memory.parts[largest])} of {gib(memory.total)})."
        )
    return " ".join(sentences)


def _of_groups(first: Prediction, best: Prediction, machine: Machine) -> str:
    """Return a sentence on the first layout in groups of the kind of the ``best`` one, or else on that one."""
    share, shares_rows = best.summing_seconds / best.step_seconds, best.layout.space.size > 1
    summing = f"its sums take {share:.0%} of a step over links of {machine.link_bandwidth / 1e9:.3g} GB/s"
    if shares_rows:
        wait, how = rounded(1e6 * machine.swap_speed[0]), "measured" if machine.swap else "assumed, not measured"
        summing = f"its swaps take {share:.0%} of a step, with a wait of {wait} µs each ({how})"
        summing += f"; {USE_REPLICAS}" if share > MOST_SWAPPING else ""
    kind, size = ("space", first.layout.space.size) if shares_rows else ("tensor", first.layout.tensor.size)
    if size > 1:
        return f"1 has {kind} groups of {size}: {summing}."
    less = f"; it would fit in {gib(best.peak.total)} where 1 needs {gib(first.peak.total)}"
    memory = less if best.peak.total < first.peak.total else ""
    ratio = best.step_seconds / first.step_seconds
    return (
        f"{kind.title()} groups: the best, {best.layout.words()}, takes {ratio:.2f} times as long: {summing}{memory}."
    )


def _bytes_between_nodes(first: Prediction, other: Prediction | None) -> str:
    """Return a sentence on bytes between nodes, and on these with the layout's ``other`` axis across nodes."""
    wires = first.traffic
    sizes = {kind: getattr(wires, kind) for kind in ("activations", "gradients", "weights", "sums", "swaps")}
    named = " and ".join(f"{size / 1e9:.3f} GB of {kind}" for kind, size in sizes.items() if size) or "nothing"
    line = f"1 has its {first.layout.axis_over_nodes} across nodes: {named} between them in a step, and "
    line += f"{wires.busiest / 1e9:.3f} GB from the busiest node"
    if other is None:
        return f"{line}."
    longer, turned = other.step_seconds / first.step_seconds - 1, other.traffic
    return (
        f"{line}; with its {other.layout.axis_over_nodes} across them it would be "
        f"{turned.between_hosts / 1e9:.3f} GB, {turned.busiest / 1e9:.3f} GB from one node, and a step "
        f"{abs(longer):.1%} {'longer' if longer >= 0 else 'shorter'}."
    )


def _difference(first: Prediction, other: Prediction) -> str:
    cause = f"micro-batches of {other.layout.micro_batch_images} against {first.layout.micro_batch_images}"
    if other.layout.checkpoint_interval and not first.layout.checkpoint_interval:
        cause = "activations are computed again"
    waits = other.bubble * other.step_seconds - first.bubble * first.step_seconds
    seconds, words = max(
        (waits, "a device waits {} more for other stages"),
        (other.pass_seconds - first.pass_seconds, f"forwards and backwards take {{}} more on a device ({cause})"),
        (other.update_seconds - first.update_seconds, "gradients and weights take {} more"),
    )
    return words.format(f"{rounded(1e3 * seconds)} ms")


def _layout_table(best: Sequence[Prediction], machine: Machine) -> list[str]:
    rows = list[dict[str, str]]()
    grouped, recomputing = (any(one.layout.tensor.size > 1 for one in best), any(one.layout.interval for one in best))
    shared = any(one.layout.space.size > 1 for one in best)
    for place, prediction in enumerate(best, start=1):
        layout, wires, size = prediction.layout, prediction.traffic, prediction.peak.total
        rate, again = layout.batch_images / prediction.step_seconds, f"every {layout.checkpoint_interval}"
        tensor = (str(layout.tensor.size), layout.tensor.levels_words())
        row = {
            "": str(place),
            "stages": str(layout.stages),
            "tensor": ", ".join(filter(None, tensor)) if grouped else "",
            "space": str(layout.space.size) if shared else "",
            "replicas": str(layout.replicas),
            "schedule": layout.schedule if layout.stages > 1 else "-",
            "micro-batches": f"{layout.micro_batches} x {layout.micro_batch_images}",
            "recompute": (again if layout.interval else "-") if recomputing else "",
            "ZeRO": f"{layout.zero_stage}{' offload' if layout.offload else ''}",
            "step ms": rounded(1e3 * prediction.step_seconds, 4),
            "images/s": f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
            "bubble": f"{prediction.bubble:.1%}",
            "GiB/device": f"{'! ' * (size > (1 - TIGHT) * machine.usable_bytes)}{size / GIB:.2f}",
            "GiB/host": "" if machine.is_cpu else f"{prediction.host_bytes(machine) / GIB:.1f}",
            "GB on wires": f"{(wires.within_hosts + wires.between_hosts) / 1e9:.3f}",
            "across nodes": layout.axis_over_nodes if machine.nodes > 1 else "",
        }
        rows.append(row)
    lines = _no_wider(rows, LEAST)
    if any("!" in row["GiB/device"] for row in rows):
        lines.append(f"! leaves less than {TIGHT:.0%} of the {gib(machine.usable_bytes)} that tensors may take")
    return lines


def _no_wider(rows: Sequence[Mapping[str, str]], least: Sequence[str], left: Sequence[str] = ()) -> list[str]:
    """Return the lines of a table, without the first ``least`` columns that make it wider than a line."""
    for count in range(len(least) + 1):
        lines = table([{name: cell for name, cell in row.items() if name not in least[:count]} for row in rows], left)
        if max(map(len, lines)) <= WIDTH:
            break
    return lines


def _memory_table(ranks: Sequence[Memory]) -> list[str]:
    """Return the table of the fullest ranks' memory, without parts that no rank has."""
    fullest = sorted(sorted(range(len(ranks)), key=lambda rank: -ranks[rank].total)[:MOST_RANKS])
    sizes = [ranks[rank].parts | {"total": ranks[rank].total, "(host)": ranks[rank].host} for rank in fullest]
    used = [name for name in sizes[0] if any(size[name] for size in sizes)]
    names = ["NCCL" if name == "communicators" else name for name in used]
    cells = [[f"{own[name] / 2**20:,.1f}" for name in used] for own in sizes]
    return aligned([["rank", *names], *([str(rank), *own] for rank, own in zip(fullest, cells, strict=True))])


def stage_table(plan: RunDraft, *, printed: bool = False) -> str:
    """Return the table of stages: layers, parameters, forward flops, bytes sent in a step."""
    grid, layout, rows = plan.grid, plan.ds.layout, list[dict[str, str]]()
    for stage in plan.stages:
        sent = stage.sent_elements * layout.batch_images // layout.replicas * ELEMENT_BYTES[plan.ds.precision]
        hosts = list(dict.fromkeys(map(str, grid.hosts_of(stage.rank)))) if grid.several_hosts else []
        several = f"{hosts[0]} ... {hosts[-1]} ({len(hosts)})" if len(hosts) > MOST_HOSTS else ", ".join(hosts)
        rows.append(
            {
                "stage": f"{stage.index} on rank {stage.rank}" if folds(layout.schedule) else str(stage.index),
                "layers": str(stage.layers),
                "first": stage.first_layer,
                "last": stage.last_layer,
                "parameters": f"{stage.parameters:,}",
                "forward GFLOP/image": f"{stage.forward_flops / 1e9:.4f}",
                "share": f"{stage.forward_flops / (2 * plan.macs):.1%}",
                "sent MB/step": f"{sent / 1e6:.2f}" if sent else "",
                "host": several,
            }
        )
    left = ("first", "last", "host")
    if not printed:
        return "\n".join(table(rows, left))
    lines, half = _no_wider(rows, LEAST_OF_STAGES, left), MOST_STAGES // 2
    return "\n".join(lines if len(rows) <= MOST_STAGES else [*lines[: half + 1], "...", *lines[-half:]])


def decided_since(planned: RunDraft, decided: RunDraft) -> str:
    """Return lines on decisions that a run's start has added to the plan; empty if there are none."""
    known, new = (planned.grid, planned.exchange), (decided.grid, decided.exchange)
    found = [line(*new) for line in (hosts_line, hosts_warning) if line(*new) != line(*known)]
    lines = [*map(wrapped, filter(None, found))]
    if cut_by_times(decided):
        same = decided.bounds == planned.bounds
        lines.append("\ncut by the layers' times on this device" + (", as above" if same else ""))
        lines += [] if same else [stage_table(decided, printed=True)]
    return "\n".join(lines)


def cut_by_times(plan: RunDraft) -> bool:
    return plan.ds.partition == "measured" and plan.ds.layout.stages > 1


def wrapped(line: str) -> str:
    """Return a line that begins with a name, wrapped beside it."""
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * NAMED, break_long_words=False, break_on_hyphens=False)


def hosts_line(grid: Grid, exchange: Exchange) -> str | None:
    """Return a line on the bytes between hosts in a step, for both axes across hosts; None for one host."""
    if not grid.hosts:
        return "hosts        of different sizes: placement and traffic are known once the ranks have met"
    if not grid.several_hosts:
        return None
    sizes, wires = list(Counter(grid.hosts).values()), traffic(grid, exchange)
    equal = len(set(sizes)) == 1
    each = f"{len(sizes)} x {counted(sizes[0], 'process')}" if equal else f"{' + '.join(map(str, sizes))} processes"
    kinds = {name: getattr(wires, name) for name in ("activations", "gradients", "weights", "swaps")}
    named = [f"{_megabytes(size)} of {name}" for name, size in kinds.items() if size]
    if not named:  # a single tensor group, on which hosts_warning has a line
        return None
    whole = f"{_megabytes(wires.between_hosts)} a step, {' and '.join(named)}," if named[1:] else f"{named[0]} a step"
    most = f"{'each' if len(set(wires.sent.values())) == 1 else 'the busiest'} sends {_megabytes(wires.busiest)}"
    line = f"hosts        {each}, {grid.across} across hosts: {whole} between them, {most}"
    if min(grid.stages, grid.replicas) == 1:
        return line
    other: AcrossHosts = "replicas" if grid.across == "stages" else "stages"
    turned = traffic(replace(grid, across=other), exchange)
    return f"{line}; {other} across would be {_megabytes(turned.between_hosts)}"


def hosts_warning(grid: Grid, exchange: Exchange) -> str | None:
    """Return a line on tensor or space groups across hosts; None if there are none."""
    if not (split := grid.split_groups):
        return None
    if grid.space > 1:
        return (
            f"warning      {counted(split, 'space group')} across hosts: each rank sends "
            f"{_megabytes(max(exchange.swaps))} a step to others that share its images, and waits for each message; "
            f"use a pipeline.space.size below {grid.space} that divides the processes of a host"
        )
    return (
        f"warning      {counted(split, 'tensor group')} across hosts: each rank sends {_megabytes(max(exchange.sums))} "
        f"a step to sum parts of layers, and waits for them; use a pipeline.tensor.size below {grid.tensor} that "
        "divides the processes of a host"
    )


def _tensor_line(layers: Sequence[Layer], layout: Layout, sent: float) -> str | None:
    """Return a line on tensor groups: layers that are split or whole, and the cost of sums; None without groups."""
    if layout.tensor.size == 1:
        return None
    whole: dict[str, list[str]] = {}
    for layer in layers:
        if layer.shards == 1 and layer.unit and is_asked(layer, layers, layout.tensor):
            whole.setdefault(counted(layer.units, layer.unit), []).append(layer.name)
    parts = [f"{sum(layer.shards > 1 for layer in layers)} of {len(layers)} layers split"]
    for reason, names in whole.items():
        few = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        if len(names) > MOST_WHOLE:
            few = f"{', '.join(names[: MOST_WHOLE - 1])} ... {names[-1]} ({len(names)} layers)"
        parts.append(f"{few} {'stay' if names[1:] else 'stays'} whole: {reason}")
    groups = counted(layout.world_size // layout.tensor.size, "group")
    cost = f"a rank sends {_megabytes(sent)} a step to sum their parts"
    return f"tensor       {groups} of {layout.tensor.size} ranks, {'; '.join(parts)}; {cost}"


def _space_line(plan: RunDraft) -> str | None:
    """Return a line on ranks that share images: their rows, and the cost of their messages; None without groups."""
    layout, layers = plan.ds.layout, plan.layers
    if layout.space.size == 1:
        return None
    shared = {layer.rows.arriving for layer in layers} - {()}
    rows, last = "+".join(map(str, layers[0].rows.arriving)), len(shared) - 1
    levels = "level 0" if last == 0 else f"levels 0-{last}"
    whole = any(not layer.rows.arriving for layer in layers)
    rest = ", lower levels computed whole on each" if whole else ""
    waits = sum(one.number for one in swaps_of(layers, layout.interval_so_far))
    groups = counted(layout.world_size // layout.space.size, "group")
    cost = f"a rank sends {_megabytes(max(plan.exchange.swaps))} a step, and a micro-batch waits {waits} times"
    return f"space        {groups} of {layout.space.size} ranks share images, {rows} rows on {levels}{rest}; {cost}"


def _small_warning(plan: RunDraft) -> str | None:
    """Return a line if ranks share the rows of images that are too small for it."""
    if plan.ds.layout.space.size == 1 or math.prod(size := plan.spec.data.size) >= FEWEST_PIXELS:
        return None
    images = f"warning      images of {'x'.join(map(str, size))} take a device less time than swaps"
    return f"{images}; {USE_REPLICAS}: {run_plan.in_replicas(plan.ds.layout)}"


def _messages_line(plan: RunDraft) -> str | None:
    """Return a line on the bytes between stages, and those of a relay; None for one stage."""
    layout = plan.ds.layout
    if layout.stages == 1:
        return None
    size = layout.batch_images // layout.replicas * ELEMENT_BYTES[plan.ds.precision]
    sent, relayed = sum(stage.sent_elements for stage in plan.stages), relayed_elements(plan.layers, layout.stages)
    return (
        f"messages     {_megabytes(size * sent)} a step and direction between stages, {sent / relayed:.1%} of the "
        f"{_megabytes(size * relayed)} of a relay of all skips{' and the text' if plan.spec.unet.text else ''}"
    )


def _megabytes(size: float) -> str:
    return f"{rounded(size / 1e6, 4)} MB"


def describe_plan(plan: RunDraft, run_dir: Path) -> str:
    """Return the text that every run prints first, and ``--dry-run`` prints alone."""
    spec, data, ds, layout = plan.spec, plan.spec.data, plan.ds, plan.ds.layout
    recompute = {0: "off", "auto": "only if memory is short"}.get(layout.checkpoint_interval) or (
        f"every {counted(layout.interval, 'layer')}"
    )
    samples, levels, held_out = spec.samples, len(HELD_OUT_QUANTILES), data.held_out_images
    drawn = f"{counted(samples.count, 'image')} by {spec.sampler.kind} in "
    drawn += counted(spec.sampler.steps_of(spec.diffusion), "step")
    evaluations = samples.count * spec.sampler.evaluations_of(spec.diffusion)
    losses, forwards = counted(held_out, "held-out image"), held_out * levels
    unknown = None if data.held_out_path else 0
    if data.held_out_path is not None:
        losses = f"{counted(held_out, 'image') if held_out else 'all images'} of {data.held_out_path}"
    sides = ["x".join(map(str, (*data.size, data.channels)))]
    sides += [f"cropped from {'x'.join(map(str, data.stored_size))}"] if data.crop_from else []
    sides += [f"latents of {data.autoencoder}"] if data.autoencoder else []
    tracker = public_address(os.environ.get("MLFLOW_TRACKING_URI", "")) or run_dir.parent
    batch = (counted(layout.batch_images, "image"), counted(layout.micro_batches, "micro-batch"))
    lines = [
        f"run          {spec.name}: {plan.spec_path} with {plan.ds_path}",
        f"data         {data.source}, {', '.join(sides)}",
        f"U-Net        {_parameters(plan.layers)} in {len(plan.layers)} layers, "
        f"{2 * plan.macs / 1e9:.4f} GFLOP forward per image",
        f"precision    {ds.precision}, ZeRO-{layout.zero_stage}, activation checkpointing {recompute}",
        f"layout       {counted(layout.world_size, 'process')}: {layout.processes_words()}"
        f"{f', schedule {layout.schedule}' if layout.stages > 1 else ''}"
        f"{', cut by flops, later by time' if cut_by_times(plan) else ''}",
        plan.chosen and plan.chosen.line,
        _tensor_line(plan.layers, layout, max(plan.exchange.sums, default=0)),
        _space_line(plan),
        _small_warning(plan),
        hosts_warning(plan.grid, plan.exchange),
        _messages_line(plan),
        hosts_line(plan.grid, plan.exchange),
        f"batch        {batch[0]} = {batch[1]} of {layout.micro_batch_images} x {counted(layout.replicas, 'replica')}",
        f"length       {counted(spec.train.images, 'image')} = {counted(plan.steps, 'step')}, "
        f"logged every {counted(spec.logging.log_every_images, 'image')}",
        _regular("samples", drawn, samples.every_images, evaluations),
        _regular("validation", f"{losses} at {levels} noise levels", spec.evaluation.every_images, forwards or unknown),
        f"outputs      {run_dir}; MLflow in {tracker}",
    ]
    return "\n".join([*map(wrapped, filter(None, lines)), "", stage_table(plan, printed=True)])


def _regular(name: str, what: str, every_images: int | None, forwards: int | None) -> str:
    """Return a line on a regular task, with the cost of its ``forwards`` relative to training, if known."""
    if not every_images or forwards == 0:
        return f"{name:<{NAMED}}off"
    share = "" if forwards is None else f" ({forwards / (PASSES_PER_STEP * every_images):.1%} of the computing)"
    return f"{name:<{NAMED}}{what}, every {every_images:,} images{share}"

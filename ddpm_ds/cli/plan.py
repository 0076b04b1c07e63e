"""``ddpm-ds plan``: find the layout that trains a U-Net fastest on given devices."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from ddpm_ds.command_line import (
    add_overwrite,
    add_spec_options,
    bandwidth,
    check_outputs,
    counted,
    file_path,
    memory_size,
    positive,
    processes,
    teraflops,
    writing,
)
from ddpm_ds.config.spec_file import load_spec, spec_overrides
from ddpm_ds.errors import LayoutError, is_out_of_memory
from ddpm_ds.planning.planner import plan
from ddpm_ds.predict.machine import KINDS, Machine
from ddpm_ds.processes.ranks import set_environment

if TYPE_CHECKING:
    from ddpm_ds.observe.device_speed import LayerTimes
    from ddpm_ds.predict.layouts import Workload
    from ddpm_ds.unet.layers import Layer

DESCRIPTION = """\
Predict memory, step time, bubble and traffic of every layout of a run on given devices, and print the fastest that
fit. A layout is stages x replicas, schedule, micro-batch, activation checkpointing, ZeRO stage and offload. Nothing is
trained; step times come from a simulator that executes the programs of the engine.
"""

EXAMPLES = """\
examples
  ddpm-ds plan --spec launch/specs/cifar10.yaml --deepspeed_config ds_configs/zero2_bf16.json --processes 8
      8 GPUs like this machine's, or 8 cores if it has none
  ddpm-ds plan --spec launch/specs/folder.yaml --set data.path=photos --deepspeed_config ds_configs/zero2_bf16.json \\
      --processes 16 --nodes 2 --device-kind a100-40 --inter-node 12.5GB/s --out plan.json --timeline plan.png
      two nodes of A100s, which need not be here; write the JSON to train with and draw the step
  ddpm-ds plan --spec launch/specs/cifar10.yaml --deepspeed_config ds_configs/zero0_fp32.json --processes 2 --measure
      time each layer on this machine instead of computing its cost

docs/planner.md says what is predicted from what.
"""


def add_plan(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``plan``."""
    about = "predict the fastest layout on given devices"
    parser = verbs.add_parser("plan", help=about, description=DESCRIPTION, epilog=EXAMPLES)
    add_spec_options(parser)
    parser.add_argument("--deepspeed_config", type=file_path, required=True, metavar="JSON", help="JSON to complete")
    parser.add_argument("--processes", type=processes, required=True, metavar="N", help="processes to train with")
    parser.add_argument("--nodes", type=processes, default=1, metavar="N", help="hosts that share them (default 1)")
    parser.add_argument("--device-kind", choices=tuple(KINDS), help="default: this machine's GPU, else cpu")
    parser.add_argument("--device-memory", type=memory_size, metavar="SIZE", help="memory of one device, such as 80GiB")
    parser.add_argument("--tflops", type=teraflops, metavar="X", help="TFLOP/s that a device reaches in convolutions")
    parser.add_argument("--bandwidth", type=bandwidth, metavar="Y", help="between devices of a node, such as 300GB/s")
    parser.add_argument("--inter-node", type=bandwidth, metavar="Z", help="to another node, such as 200Gbit/s")
    parser.add_argument("--measure", action="store_true", help="time the layers on this machine; times are cached")
    parser.add_argument("--top", type=positive, default=10, metavar="N", help="layouts to print (default 10)")
    parser.add_argument("--out", type=file_path, metavar="FILE", help="write the DeepSpeed JSON of the first one")
    parser.add_argument("--timeline", type=file_path, metavar="PNG", help="draw the step of the first one")
    add_overwrite(parser)
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> None:
    check_outputs(options, "out", "timeline")
    spec = load_spec(options.spec, spec_overrides(options.overrides))
    if options.measure and options.tflops:
        raise LayoutError("--tflops says nothing of layers that are timed; leave it or --measure out")
    set_environment()
    hidden = None if options.measure else True
    with tqdm(desc="timing layers", unit=" layers", leave=False, disable=hidden) as bar:
        found = plan(
            spec,
            options.deepspeed_config,
            options.overrides,
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
    from ddpm_ds.predict.report import draw_timeline, report  # imports deepspeed, as the planner has

    predictor, job, devices = found.predictor, found.predictor.job, found.predictor.machine
    parameters = sum(layer.parameters for layer in job.layers)
    print(f"U-Net    {spec.name}: {parameters:,} parameters, {job.precision}, {spec.train.batch_images} images a step")
    print(f"devices  {devices.words()}")
    print(f"layers   {'timed on this machine' if options.measure else 'computed, not timed (--measure times them)'}\n")
    print(report(found))
    first = found.best[0].layout
    if options.out is not None:
        with writing(options.out, overwrite=options.overwrite) as file:
            file.write(f"{json.dumps(found.ds_config(), indent=2)}\n".encode())
        where = ["--processes", str(options.processes)] if options.nodes == 1 else ["--hostfile", "hostfile"]
        command = ["ddpm-ds", "train", *where, "--deepspeed_config", str(options.out), "--spec", str(options.spec)]
        command += [word for change in spec_overrides(options.overrides) for word in ("--set", change)]
        print(f"\ntrain with 1: {shlex.join(command)}")
    if options.timeline is not None and first.stages == 1:
        print(f"{options.timeline}: not drawn, as 1 has one stage, which waits for no other")
    elif options.timeline is not None:
        step = predictor.simulate(first, keep_events=True)
        with writing(options.timeline, overwrite=options.overwrite) as file:
            draw_timeline(step, f"{spec.name}: {first.words()}", file)
        print(f"{options.timeline}: the step of 1")


def _measured(bar: tqdm[NoReturn], job: Workload, devices: Machine) -> LayerTimes:
    """Return the times of layers on this machine; ``bar`` counts those that are timed."""
    import torch

    from ddpm_ds.device import choose_device
    from ddpm_ds.observe.device_speed import LayerSeconds, measured_times

    device = choose_device("cpu" if devices.is_cpu else "cuda")
    if devices.is_cpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // devices.devices_per_node))

    def progress(layer: Layer, images: int) -> None:
        bar.set_postfix_str(f"{layer.name}, {counted(images, 'image')}", refresh=False)
        bar.update()

    measure = measured_times(job.layers, device, job.precision, progress)

    def times(images: int) -> Sequence[LayerSeconds]:
        try:
            return measure(images)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise LayoutError(
                f"--measure ran out of memory with a layer and {counted(images, 'image')}; free the device's memory or "
                "use a smaller --device-memory"
            ) from None

    return times

"""Passes of one image on one core and on two that share it, measured and predicted.

    python -m tests.planning.space_steps --sizes 64 256

needs two quiet cores and four minutes. A U-Net of 64 channels, 8 of them in and out, is trained on one image in fp32:
forward and backward of the least of some steps. The planner predicts both from layers that it times, and from a swap
between two processes.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.pipeline.schedule import PASSES, Instruction
from tests.launching import run_ranks
from tests.planning.small import field_spec

STEPS = 4  # of which the least is taken, after one that is not timed


def spec_of(size: int) -> RunSpec:
    """A U-Net of 6.1 million parameters."""
    return field_spec(size, 8, {"channels": 64, "multipliers": [1, 2, 2], "blocks_per_level": 2})


def measured(size: int, ranks: int) -> float:
    """Seconds of the passes of a step of so many processes, on the slowest."""
    with TemporaryDirectory() as folder:
        ended = run_ranks(ranks, Path(__file__), "--worker", folder, "--sizes", str(size))
        assert ended.returncode == 0, ended.stderr[-3000:]
        return max(json.loads(file.read_text()) for file in Path(folder).iterdir())


def train(size: int, folder: Path) -> None:
    """Train on this rank, and write the seconds of its passes."""
    import torch
    import torch.distributed as dist

    from ddpm_ds.ground.device import choose_device
    from ddpm_ds.observe.observer import instructions_wrapped
    from ddpm_ds.processes.process_group import process_group
    from tests.pipeline.batches import global_batch, micro_batches
    from tests.pipeline.ladder_worker import Case

    choose_device("cpu")
    torch.set_num_threads(1)
    with process_group():
        spec, taken = spec_of(size), list[float]()
        case = Case(1, 1, 0, "fp32", 0, micro_batches=1, fused=True, space=dist.get_world_size())
        engine = case.engine(spec, kernels="auto")

        def timed(instruction: Instruction, execute: Callable[[], None]) -> None:
            begin = time.perf_counter()
            execute()
            taken[-1] += (time.perf_counter() - begin) * (instruction.name in PASSES)

        with instructions_wrapped(engine, timed):
            for _ in range(1 + STEPS):
                dist.barrier()
                taken.append(0.0)
                engine.train_batch(micro_batches(engine, global_batch(spec, 0)))
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(min(taken[1:])))


def predicted(size: int, ranks: int) -> float:
    """Seconds of the passes by the planner, from its own measurements."""
    import torch

    from ddpm_ds.ground.device import choose_device
    from ddpm_ds.observe.device_speed import known_swap, measure_swap, measured_times
    from ddpm_ds.planning.inputs import Workload, machine
    from ddpm_ds.planning.predictor import Predictor
    from ddpm_ds.schema.layout import Layout, SpaceSplit
    from tests.ds_json import config_of

    device = choose_device("cpu")
    torch.set_num_threads(1)
    measure_swap("cpu", device)
    here = replace(machine("cpu", half=False, devices=ranks, nodes=1), swap=known_swap("cpu"))
    job = Workload(spec_of(size), config_of(), on_cpu=True)
    layout = Layout(1, 1, "1f1b", 1, 1, 0, 0, offload=False, space=SpaceSplit(ranks))
    (costs,) = Predictor(job, here, measured_times(device, "fp32")).costs(layout, (0, len(job.layers)))
    return costs.pass_seconds


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--sizes", type=int, nargs="+", default=[64, 256], help="pixels of a side of the image")
    options.add_argument("--worker", type=Path)
    given = options.parse_args()
    if given.worker is not None:
        train(given.sizes[0], given.worker)
        return
    for size in given.sizes:
        found = {ranks: (measured(size, ranks), predicted(size, ranks)) for ranks in (1, 2)}
        for ranks, (took, guess) in found.items():
            error = f"{guess / took - 1:+.0%}"
            print(f"{size}x{size} on {ranks}: {1e3 * took:,.0f} ms, predicted {1e3 * guess:,.0f} ms ({error})")
        ratios = (found[2][number] / found[1][number] for number in (0, 1))
        print(f"{size}x{size}: two take {{:.2f}} of the time of one, predicted {{:.2f}}".format(*ratios), flush=True)


if __name__ == "__main__":
    main()

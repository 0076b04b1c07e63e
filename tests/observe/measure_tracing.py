"""What tracing costs a traced step, against an engine that is not traced, the two taking turns in one process.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 tests/observe/measure_tracing.py \
        --deepspeed_config ds_configs/zero2_fp16.json -p 2 --rounds 15 --steps-per-round 20
"""

from __future__ import annotations

import argparse
import os
import timeit

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from ddpm_ds.benchmark.measure import Spread, ratios, time_rounds
from ddpm_ds.benchmark.rows import Setting
from ddpm_ds.benchmark.rows_deepspeed import OurPipeline
from ddpm_ds.command_line import OneLineParser, set_environment
from ddpm_ds.data.prepare import prepare
from ddpm_ds.device import choose_device
from ddpm_ds.observe.recording import Recording
from ddpm_ds.pipeline.host_accelerator import use_host_accelerator
from ddpm_ds.train.command import add_run_options
from ddpm_ds.train.plan import plan_run
from ddpm_ds.train.session import fill_checkpointing, process_group, share_threads


class TracedPipeline(OurPipeline):
    """A row each step of which is traced."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, setting.plan.ds.schedule)
        self._recording = Recording(self._engine, 0)

    def step(self) -> Tensor:
        self._recording.begin_step(self._recording.step + 1)
        return super().step()

    def seconds_per_event(self) -> float:
        """What recording adds to an instruction that does nothing, at its fastest."""

        def nothing() -> None: ...

        self._engine.execute[schedule.ReduceGrads] = nothing
        recording = Recording(self._engine, 0)
        timed = self._engine.execute[schedule.ReduceGrads]
        bare, recorded = (min(timeit.repeat(call, number=1000, repeat=50)) / 1000 for call in (nothing, timed))
        recording.abandon()
        return recorded - bare


def main() -> None:
    set_environment()
    parser = OneLineParser(prog="measure_tracing.py", formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps-per-round", type=int, default=20)
    options = parser.parse_args()
    plan = plan_run(
        options.spec,
        options.overrides,
        options.deepspeed_config,
        world_size=int(os.environ["WORLD_SIZE"]),
        stages=options.pipeline_stages,
    )
    device = choose_device(options.device)
    use_host_accelerator()
    share_threads(device)
    store = prepare(plan.spec.data, progress=False)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()

    with process_group():
        setting = Setting(plan, fill_checkpointing(plan, device), store, device, verbose=False)
        rows = OurPipeline(setting, plan.ds.schedule), TracedPipeline(setting)
        for row in rows:
            for _ in range(5):
                row.step()
        plain, traced = time_rounds(
            rows,
            rounds=options.rounds,
            steps=options.steps_per_round,
            synchronize=synchronize,
            after_round=lambda: None,
        )
        event = rows[1].seconds_per_event()
        ratio, seconds = Spread.of(ratios(traced, plain)), Spread.of(plain)
        if dist.get_rank() == 0:
            print(
                f"traced / not traced {ratio.median:.4f} ({ratio.low:.4f}-{ratio.high:.4f}), "
                f"{1e3 * seconds.median:.1f} ms a step not traced, {1e6 * event:.1f} us an event, "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

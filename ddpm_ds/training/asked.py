"""Options that a run obeys beside its plan; imports nothing slow, since options are read before PyTorch is imported."""

from dataclasses import dataclass
from pathlib import Path

from ddpm_ds.ground.files import expanded
from ddpm_ds.ground.options import HIDDEN, flag, limited_seconds, option, seconds, step_range, valid_text
from ddpm_ds.processes.ranks import DEAD_SECONDS, HANG_SECONDS
from ddpm_ds.tracking.run_folder import OUTPUT_ROOT

TRACED_STEPS = range(20, 23)
"""Optimizer steps that are traced by default."""


@dataclass(frozen=True)
class Asked:
    """Options of ``launch/train.py`` that a run's start and loop obey."""

    verbose: bool = flag("show DeepSpeed's own log")
    run_dir: Path | None = option(
        f"folder of this run, where it is resumed; MLflow's store is beside it (default {OUTPUT_ROOT}/DATE-NAME)", "DIR"
    )
    resume: str = option(
        "auto: from the newest good checkpoint of --run-dir, if any (default); or from any run's",
        "auto|never|CHECKPOINT|RUN_DIR",
        lambda text: str(expanded(text)),
        default="auto",
    )
    start_seconds: float = option("time to wait for the last rank (%(default)g)", "S", limited_seconds, default=300.0)
    dead_seconds: float = option("silence that gives a rank up (%(default)g)", "S", seconds, default=DEAD_SECONDS)
    hang_seconds: float = option("time without a step that ends all (%(default)g)", "S", seconds, default=HANG_SECONDS)
    trace_steps: range | None = option(
        f"steps to time, for timeline and verdict, or none (default {TRACED_STEPS[0]}-{TRACED_STEPS[-1]} if there are)",
        "FIRST-LAST",
        step_range,
    )
    profile_kernels: range = option(
        "steps whose kernels PyTorch's profiler records", "FIRST-LAST", step_range, default=range(0)
    )
    note: str | None = option("why this run is made; kept with it in MLflow", "TEXT", valid_text)
    parent_run: str | None = option(HIDDEN)
    """Identity of this run's parent run in MLflow, for ``ddpm-ds sweep``."""

    def traced(self, steps: int) -> range:
        """Return the steps to trace in a run of ``steps`` steps."""
        if self.trace_steps is None:
            return TRACED_STEPS if TRACED_STEPS[-1] <= steps else range(0)
        return self.trace_steps

"""Trackers besides MLflow: TensorBoard and Weights & Biases, with the same names of metrics.

Each takes one record at a time, when it is written; a start opens the run, and its end closes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ddpm_ds.errors import SpecError
from ddpm_ds.tracking.events import Record
from ddpm_ds.tracking.run_folder import IDENTITY

TENSORBOARD_FOLDER = "tensorboard"  # folder of a run's folder that TensorBoard reads


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of ``logging.trackers`` are installed.

    Raises:
        SpecError: a package is missing; the message has the command that installs it.
    """
    for name in names:
        if find_spec(name) is None:
            raise SpecError(f"logging.trackers has {name}, which is not installed; pip install 'ddpm_ds[{name}]'")


class TensorBoard:
    """Event files in the folder ``tensorboard`` of the run's folder; a resumed run adds one to them."""

    def send(self, batch: Sequence[Record]) -> None:
        match batch[0]:
            case {"start": start}:
                self._open(start)
            case {"metrics": values, "time": at} | {"numbers": values, "time": at}:
                step = int(batch[0].get("step", at / 1000 - self._began))
                for name, value in values.items():
                    self._writer.add_scalar(name, value, step, walltime=at / 1000)
            case {"image": path, "key": key, "step": step, "time": at}:
                import numpy as np
                from PIL import Image

                with Image.open(path) as image:
                    pixels = np.asarray(image.convert("RGB"))
                self._writer.add_image(key, pixels, step, walltime=at / 1000, dataformats="HWC")
            case {"finish": _}:
                return self._writer.close()
        self._writer.flush()  # what is sent is kept, even if this process is killed

    def _open(self, start: Record) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run_dir = Path(start["run_dir"])
        identity = run_dir / IDENTITY  # as old as the run, which may have been resumed
        self._began = identity.stat().st_mtime if identity.exists() else start["time"] / 1000
        self._writer = SummaryWriter(str(run_dir / TENSORBOARD_FOLDER))
        rows = "".join(f"| {name} | {value} |\n" for name, value in start["params"].items())
        self._writer.add_text("parameters", f"| name | value |\n|---|---|\n{rows}", 0)


class WeightsAndBiases:
    """Run of the project with the experiment's name, under the run's identity, so that a resume continues it.

    Account and mode are the environment's: ``wandb login``, or ``WANDB_MODE=offline`` for a run that is sent later.
    """

    def send(self, batch: Sequence[Record]) -> None:
        match batch[0]:
            case {"start": start}:
                self._open(start)
            case {"metrics": values, "step": step}:
                self._run.log({**values, "step": step})
            case {"metrics": values, "time": at}:
                self._run.log({**values, "time": at / 1000})
            case {"image": path, "key": key, "step": step}:
                self._run.log({key: self._image(path), "step": step})
            case {"numbers": values}:
                self._run.summary.update(values)
            case {"tags": tags}:
                self._run.config.update(tags, allow_val_change=True)
            case {"finish": status}:
                self._run.finish(exit_code=0 if status == "FINISHED" else 1)

    def _open(self, start: Record) -> None:
        import wandb

        self._image = wandb.Image
        self._run = wandb.init(
            project=start["experiment"],
            name=start["run_name"],
            id=start["id"],
            resume="allow",
            dir=start["run_dir"],
            config=start["params"],
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="step")  # a resumed run repeats steps, which its own may not
        self._run.define_metric("system/*", step_metric="time")


KINDS: dict[str, type[TensorBoard | WeightsAndBiases]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""Trackers by their names in ``logging.trackers``, which are also those of their packages."""

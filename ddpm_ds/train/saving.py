"""When the run is saved and how it goes back: the loop's side of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddpm_ds.checkpoint.groups import Groups
from ddpm_ds.checkpoint.manifest import Description
from ddpm_ds.checkpoint.union import Whole, newest
from ddpm_ds.checkpoint.writer import Writer
from ddpm_ds.errors import BadNumbersError, NoCheckpointError
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.train import state
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.plan import RunPlan
from ddpm_ds.train.tracking import print_to_stderr
from ddpm_ds.unet.model import parameter_shapes


class Saver:
    """Writes this rank's share of checkpoints into ``folder``; all methods are collective.

    ``data_sha256`` are the checksums of the prepared store, ``say`` shows a line on rank 0. ``groups`` are the ranks
    by the folder of that name that they see, all of them the same one where it is None; ``store``, of
    :func:`ddpm_ds.train.heartbeat.make_store`, is needed where there are several.
    """

    def __init__(
        self,
        plan: RunPlan,
        config: dict[str, Any],
        engine: UnetPipelineEngine,
        ema: Ema,
        folder: Path,
        *,
        data_sha256: dict[str, str],
        say: Callable[[str], None],
        groups: Groups | None = None,
        store: dist.Store | None = None,
    ) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._plan, self._config, self._engine, self._ema = plan, config, engine, ema
        self._folder, self._data_sha256, self._say = folder, data_sha256, say
        self._groups = groups or Groups.one_folder(rank, world_size)
        spec = plan.spec.checkpoint
        self._every = spec.every_images
        self._writer = Writer(
            folder,
            rank,
            world_size,
            say=say if rank == 0 else print_to_stderr,
            keep_last=spec.keep_last,
            keep_every_images=spec.keep_every_images,
            groups=self._groups,
            store=store,
        )
        self._shapes = parameter_shapes(plan.layers)
        self.rewinds = 0
        """How often the run has gone back after bad numbers."""

    def due(self, before: int, images_seen: int) -> bool:
        """Whether a step from ``before`` to ``images_seen`` passed a point of ``checkpoint.every_images``."""
        return self._every is not None and images_seen // self._every > before // self._every

    def save(self) -> float:
        """Begin a checkpoint of this moment; returns the seconds for which training was held up."""
        engine, plan = self._engine, self._plan
        description = Description(
            images=engine.images_seen,
            step=engine.global_steps,
            spec=plan.spec.model_dump(mode="json"),
            ds_config=self._config,
            layout=asdict(plan.ds.layout),
            data_sha256=self._data_sha256,
            parameters=self._shapes,
        )
        part = f"stage{engine.stage_id}-replica{engine.grid.get_data_parallel_id()}"
        scalars = {**state.scalars(engine), "rewinds": self.rewinds}
        self._writer.begin(part, state.fragments(engine, self._ema), description, scalars)
        return self._writer.seconds_blocked

    def wait(self) -> bool:
        """Wait until the last checkpoint is on the disk; whether it is, as rank 0 knows."""
        return self._writer.wait()

    def load(self, checkpoint: Whole) -> None:
        """Go on from a checkpoint of any layout, whose pieces are on any of this run's hosts.

        Raises:
            CheckpointError: it can't be read or is of another U-Net.
        """
        state.load(self._engine, self._ema, checkpoint, gather_objects, self._say)
        self.rewinds = checkpoint.state["rewinds"]

    def rewind(self, trouble: str) -> str:
        """Go back to the newest checkpoint and leave out the images since; returns what was done.

        Raises:
            BadNumbersError: it was done often enough, or there is no checkpoint to go back to.
        """
        engine, limit = self._engine, self._plan.spec.bad_numbers.max_rewinds
        self.wait()
        bad_until, rewinds = engine.next_index, self.rewinds + 1
        if rewinds > limit:
            raise BadNumbersError(f"{trouble}; the run was rewound {limit} times before (bad_numbers.max_rewinds)")
        checkpoint = self._newest()
        if checkpoint is None:
            raise BadNumbersError(f"{trouble}; bad_numbers.policy = rewind found no checkpoint to go back to")
        self.load(checkpoint)
        self.rewinds = rewinds
        engine.skipped_images = bad_until - engine.images_seen
        went_back = f"went back to {checkpoint.path.name} and left out the images since"
        return f"{trouble}; {went_back} (rewind {rewinds} of {limit})"

    def _newest(self) -> Whole | None:
        """The newest good checkpoint. Later ones than now are of a course that the run has left."""
        try:
            return newest(self._folder, self._groups, gather_objects, self._say, until=self._engine.images_seen)
        except NoCheckpointError:
            return None


def gather_objects(value: Any) -> list[Any]:
    """What every rank has given, by rank; collective over the process group."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

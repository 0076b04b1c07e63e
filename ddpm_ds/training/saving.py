"""Checkpoints of an engine: content, saving, loading and rollback.

Each rank writes the pieces that its optimizer owns, by parameter name and offset, and reads the pieces that it owns. So
a checkpoint does not depend on stages, replicas, tensor groups, ZeRO stage or precision.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ddpm_ds.checkpoint.folder import CompleteCheckpoint, agreed, newest
from ddpm_ds.checkpoint.manifest import EMA, MASTER, MOMENTS, Description
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.checkpoint.writer import Fragment, Writer
from ddpm_ds.config.ds_config import ResolvedDsConfig
from ddpm_ds.config.ds_model import DS_CONFIG
from ddpm_ds.config.spec import CheckpointSpec, RunSpec
from ddpm_ds.data.cache import FieldFacts
from ddpm_ds.ground.errors import BadNumbersError, NoCheckpointError, OutputError, print_to_stderr
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.adam8bit import Adam8bit
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import all_gather_objects, broadcast_object
from ddpm_ds.tracking.run_folder import checkpoints_of
from ddpm_ds.training.ema import Ema
from ddpm_ds.training.resume import InitialWeights
from ddpm_ds.unet.layers import Layer, parameter_shapes


def state_fragments(engine: UnetPipelineEngine, ema: Ema) -> list[Fragment]:
    """Return this rank's share of a checkpoint; values that several ranks have alike are of the first."""
    if engine.grid.get_data_parallel_id() != 0 and not insides.is_partitioned(engine):
        return []
    found, optimizer = [], engine.basic_optimizer
    for piece in (*engine.gradients.owned(), *engine.gradients.frozen):
        if not piece.saved or (piece.shard is None and engine.module.tensor.rank):
            continue
        tensors = {EMA: ema.of(piece.master), MASTER: piece.master}
        if isinstance(optimizer, Adam8bit) and piece.trained:
            found += optimizer.fragments(piece)
        else:
            state = optimizer.state.get(piece.master, {})
            tensors |= {moment: state[moment] for moment in MOMENTS if moment in state}
        place = piece.name, piece.first
        found += [Fragment(kind, *place, piece.of(one), shard=piece.shard) for kind, one in tensors.items()]
    return found


def described(
    spec: RunSpec, ds: ResolvedDsConfig, layers: Sequence[Layer], data_sha256: dict[str, str], fields: FieldFacts | None
) -> Description:
    """Return a run's description, before its first image; the checksums and ``fields`` are of the data-set cache."""
    values, facts = spec.model_dump(mode="json"), None if fields is None else fields.model_dump(mode="json")
    about = {"ds_config": ds.as_json(), "layout": ds.layout.sizes, "parameters": parameter_shapes(layers)}
    return Description(images=0, step=0, spec=values, data_sha256=data_sha256, fields=facts, **about)


class Saver:
    """Saver of this rank's share of checkpoints of a run in ``run_dir``; all methods are collective.

    ``log`` shows a line on rank 0. ``store`` is of the ranks' :class:`ddpm_ds.processes.rendezvous.Rendezvous`.
    """

    def __init__(
        self,
        engine: UnetPipelineEngine,
        ema: Ema,
        run_dir: Path,
        keeping: CheckpointSpec,
        about: Description,
        *,
        log: Callable[[str], None],
        store: dist.Store | None = None,
    ) -> None:
        self._engine, self._ema, self._about = engine, ema, about
        self._folder, self._log, rank = checkpoints_of(run_dir), log, dist.get_rank()
        self._writer = Writer(
            self._folder,
            rank,
            dist.get_world_size(),
            log=log if rank == 0 else print_to_stderr,
            keep_last=keeping.keep_last,
            keep_every_images=keeping.keep_every_images,
            store=store,
        )
        self.rollbacks = 0
        """Number of rollbacks after bad numbers."""

    def save(self) -> float:
        """Begin a checkpoint of the current state; return the seconds for which training was blocked."""
        engine, optimizer = self._engine, self._engine.basic_optimizer
        description = self._about.model_copy(update={"images": engine.images_seen, "step": engine.global_steps})
        part = f"stage{engine.stage_id}-replica{engine.grid.get_data_parallel_id()}"
        part += f"-tensor{engine.module.tensor.rank}" if engine.module.tensor.size > 1 else ""
        state = {
            "images_seen": engine.images_seen,
            "skipped_images": engine.skipped_images,
            "steps": engine.global_steps,
            "skipped_steps": engine.count_skipped_steps(),
            "optimizer_steps": max((int(state["step"]) for state in optimizer.state.values()), default=0),
            "learning_rate": optimizer.param_groups[0]["lr"],
            "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
            "loss_scaler": engine.gradients.scaler_state(),
            "rollbacks": self.rollbacks,
        }
        return self._writer.begin(part, state_fragments(engine, self._ema), description, state)

    def check_saved(self) -> None:
        """Wait until the last checkpoint is on the disk; raises OutputError on all ranks if it can't be written."""
        if why_not := broadcast_object("" if self._writer.wait() else self._writer.why_not, str):
            raise OutputError(f"{why_not}; make {self._folder} writable, with room, and start the same command again")

    @torch.no_grad()
    def start_from(self, weights: InitialWeights) -> None:
        """Load initial weights into a fresh engine and its averages."""
        self._engine.gradients.load_frozen(
            lambda piece: weights.read_part(piece.name, piece.shard, piece.first, piece.length)
        )
        for piece in self._engine.gradients.owned():
            for tensor in (piece.master, self._ema.of(piece.master)):
                piece.of(tensor).copy_(weights.read_part(piece.name, piece.shard, piece.first, piece.length))
        self._engine.gradients.refresh_weights()

    @torch.no_grad()
    def load(self, checkpoint: CompleteCheckpoint) -> None:
        """Resume from a checkpoint of any layout; CheckpointError if it can't be read, or is of another U-Net."""
        engine, state, optimizer = self._engine, checkpoint.state, self._engine.basic_optimizer
        reader = Reader(checkpoint.path, checkpoint.manifest, verified=checkpoint.verified)
        moments = [moment for moment in MOMENTS if moment in checkpoint.manifest.kinds]
        engine.gradients.load_frozen(lambda one: reader.read_part(MASTER, one.name, one.shard, one.first, one.length))
        for piece in engine.gradients.owned():
            place = piece.name, piece.shard, piece.first, piece.length
            tensors: dict[str, Tensor] = {MASTER: piece.master, EMA: self._ema.of(piece.master)}
            if isinstance(optimizer, Adam8bit):
                for kind in moments:
                    optimizer.load(piece, kind, reader.read_part(kind, *place))
            elif moments:
                adam = optimizer.state[piece.master]  # empty before its first step
                adam |= {kind: torch.zeros_like(piece.master) for kind in MOMENTS if kind not in adam}
                where = piece.master.device if optimizer.param_groups[0].get("fused") else "cpu"
                adam["step"] = torch.tensor(float(state.optimizer_steps), device=where)
                tensors |= {kind: adam[kind] for kind in MOMENTS}
            for kind, tensor in tensors.items():
                piece.of(tensor).copy_(reader.read_part(kind, *place))
        if isinstance(optimizer, Adam8bit):
            optimizer.set_steps(state.optimizer_steps)
        elif not moments:
            optimizer.state.clear()
        was, now = (DS_CONFIG.read(one.ds_config) for one in (checkpoint.manifest, self._about))
        if moments and was.is_8bit != now.is_8bit:
            how = "rounded to 8 bits" if now.is_8bit else "in fp32 from here on; the checkpoint has them in 8 bits"
            self._log(f"Adam's moments of weights are {how}")
        if now.rounds and not was.rounds:
            self._log("weights are rounded to bf16, and have no fp32 masters from here on")
        engine.gradients.refresh_weights()
        engine.images_seen = engine.global_samples = state.images_seen
        engine.skipped_images, engine.skipped_steps = state.skipped_images, state.skipped_steps
        engine.global_steps = state.steps
        for group in engine.basic_optimizer.param_groups:
            group["lr"] = state.learning_rate
        if engine.lr_scheduler is not None and state.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(state.lr_scheduler.model_dump())
        engine.gradients.load_scaler_state(state.loss_scaler.model_dump(exclude_unset=True))
        engine.graph.forget()  # Adam's tensors may be others
        self.rollbacks = state.rollbacks

    def roll_back(self, trouble: str, limit: int) -> str:
        """Go back to the newest checkpoint and skip the images seen since; return a line that begins with the
        ``trouble``. BadNumbersError if that was done ``limit`` times, or there is no checkpoint to go back to.
        """
        engine = self._engine
        self._writer.wait()
        bad_until, rollbacks = engine.next_index, self.rollbacks + 1
        if rollbacks > limit:
            raise BadNumbersError(f"{trouble}; the run was rolled back {limit} times (bad_numbers.max_rollbacks)")
        checkpoint = self.before_now()
        if checkpoint is None:
            raise BadNumbersError(f"{trouble}; bad_numbers.policy = rollback found no checkpoint to go back to")
        self.load(checkpoint)
        self.rollbacks = rollbacks
        engine.skipped_images = bad_until - engine.images_seen
        where = f"rolled back to {checkpoint.path.name}, leaving out the images since"
        return f"{trouble}; {where} (rollback {rollbacks} of {limit})"

    def before_now(self) -> CompleteCheckpoint | None:
        """Return the newest good checkpoint up to now; later ones were abandoned by a rollback or resume."""
        find = partial(newest, self._folder, self._log, until=self._engine.images_seen)
        try:
            return agreed(find, dist.get_rank(), partial(all_gather_objects, kind=dict))
        except NoCheckpointError:
            return None

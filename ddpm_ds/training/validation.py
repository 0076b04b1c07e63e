"""Sampling and validation while training: pictures, and the loss on images that are never trained on.

Both use the averaged weights and run through the pipeline: replicas share the images, stages share the U-Net.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.captions import EncodedPrompts
from ddpm_ds.data.held_out import Subset
from ddpm_ds.data.latents import Coder, autoencoder_of, condition_pixels, pixels_of, to_pixels
from ddpm_ds.data.text import Encoded
from ddpm_ds.diffusion.condition import Condition, Conditions, Moves, Prompts, Scale, no_text
from ddpm_ds.diffusion.samplers import Drawing, Sampler
from ddpm_ds.ground.keyed import SAMPLE_SEED
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import broadcast, broadcast_object
from ddpm_ds.pipeline.staged import ForwardPipeline
from ddpm_ds.planning.run_plan import FIRST_PICTURE_SECONDS
from ddpm_ds.processes.watchdog import Watchdog
from ddpm_ds.schema.choices import OBJECTIVES
from ddpm_ds.tracking.pictures import MOST_MEMBERS, MOST_ROWS, Drawn
from ddpm_ds.tracking.progress import duration
from ddpm_ds.tracking.recorder import Recorder
from ddpm_ds.training.ema import Ema
from ddpm_ds.training.held_out_loss import HeldOutLoss
from ddpm_ds.training.meters import is_due

PART, QUICK_SECONDS = 8, 0.5
"""Evaluations of the U-Net, on each micro-batch of a picture, between two checks for a stop. A slower evaluation than
``QUICK_SECONDS`` has a check of its own."""
Stops = Callable[[], bool]
"""Collective function that returns whether the run is asked to stop, the same on all ranks."""


class Stopped(Exception):
    """The run is asked to stop, so pictures and losses are left out; on all ranks alike."""


def _parts(calls: Sequence[int], stops: Stops) -> Iterator[Sequence[int]]:
    """Yield calls in parts, slow ones one by one; raises Stopped between them if the run is asked to stop."""
    first, size = 0, 1
    while first < len(calls):
        if stops():
            raise Stopped
        begin = time.perf_counter()
        yield calls[first : first + size]
        first += size
        if size == 1 and first < len(calls) and broadcast_object(time.perf_counter() - begin < QUICK_SECONDS, bool):
            size = PART


class Previews:
    """The first ``samples.count`` images of the sampler of an engine's run, as ``ddpm-ds sample`` draws them.

    A run with a condition of each image draws members for the first of ``images``, a run with text for ``prompts``.
    """

    def __init__(
        self,
        spec: RunSpec,
        engine: UnetPipelineEngine,
        watchdog: Watchdog,
        images: Subset,
        prompts: Prompts | None = None,
        stops: Stops = lambda: False,
    ) -> None:
        self._spec, self._engine, self._watchdog, self._prompts, self._stops = spec, engine, watchdog, prompts, stops
        self._store, self._positions = store, positions = images
        data, device, statistics = spec.data, engine.device, store.meta.statistics
        own = statistics.get("images") if data.are_fields else None
        self._scale = Scale.of(data.normalise, own, device, pictures=not data.are_fields)
        autoencoder = autoencoder_of(data)
        self._coder = None if autoencoder is None else Coder(autoencoder, device)
        self._to_pixels = to_pixels(self._coder)
        self._conditions: Conditions | None = None
        self.count, self.members = spec.samples.count, 1
        if data.condition is not None:
            given = statistics.get("condition")
            self._conditions = Conditions(data, device, statistics=given, constants=store.constants)
            if self._conditions.reads:
                if data.buckets is not None:
                    positions = self._positions = images.of_size(data.size).positions
                most = MOST_MEMBERS if OBJECTIVES[spec.diffusion.objective].diffuses else 1
                self.members = max(k for k in range(1, most + 1) if self.count % k == 0)
                self.count = min(self.count, self.members * len(positions))

    def draw(self) -> Drawn | None:
        """Draw the images, None on ranks other than 0; raises Stopped if the run is asked to stop. Collective."""
        spec, engine, replicas = self._spec, self._engine, self._engine.replicas
        sampler = Sampler(spec.sampler, spec.diffusion.at(spec.data.size))
        # enough micro-batches to keep all stages at work, none larger than in training
        images = max(1, min(engine.micro_batch_size, math.ceil(self.count / (replicas * engine.num_stages))))
        rounds = math.ceil(self.count / (replicas * images))
        drawings = []
        for number in range(rounds) if engine.is_first_stage() or self._prompts is not None else ():
            drawings.append(
                self._drawing(sampler, torch.arange(images) + (number * replicas + engine.replica) * images)
            )
        # guided evaluations carry several times the images, and messages have one shape for a whole run of the pipeline
        for guided, group in itertools.groupby(range(len(sampler.guided)), sampler.guided.__getitem__):
            visits = [*group]

            def context(number: int, visit: int = visits[0]) -> Tensor | None:
                return drawings[number % rounds].context(visit)

            pipeline = ForwardPipeline(engine, images * (spec.sampler.predictions if guided else 1))
            for some in _parts(visits, self._stops):
                pipeline.run(
                    rounds * len(some),
                    lambda number: drawings[number % rounds].inputs(),
                    lambda number, prediction: drawings[number % rounds].take(prediction),
                    context=context,
                    depth=rounds,
                    progress=self._watchdog.progress,
                )
        if not engine.is_first_stage() or engine.module.tensor.rank > 0:  # a tensor group has drawn the same
            return None
        with self._watchdog.pause():  # an autoencoder may take long
            mine = torch.cat([drawing.images() for drawing in drawings])  # (rounds x images, C, H, W)
            mine = self._scale.to_physical(mine) if spec.data.are_fields else self._to_pixels(mine)
        mine = mine.contiguous().unflatten(0, (rounds, images))  # NCCL refuses images that are channels-last in 5 dims
        everyone = [torch.empty_like(mine) for _ in range(engine.dp_world_size)]
        dist.all_gather(everyone, mine, group=engine.grid.get_data_parallel_group())
        everyone = everyone[:: engine.ranks_of_image]  # a space group has drawn the same
        drawn = torch.stack(everyone, dim=1).flatten(0, 2)[: self.count].cpu()  # in the order of their index
        return self._beside(drawn) if dist.get_rank() == 0 else None

    def _drawing(self, sampler: Sampler, index: Tensor) -> Drawing:
        """Begin the images with the numbers ``index`` (N,); numbers beyond the last take its input."""
        data, classes, device = self._spec.data, self._spec.unet.classes, self._engine.device
        condition = dropped = None
        prompted, labels = index, None if classes is None else index % classes
        if self._conditions is not None:
            inputs = index.clamp(max=self.count - 1) // self.members
            condition = self._condition(self._conditions, inputs)
            dropped = self._conditions.dropped(condition)
            if self._conditions.reads:
                prompted = inputs  # the caption of the input
                if labels is not None:
                    labels = torch.from_numpy(self._store.labels[self._positions[inputs.numpy()]])
        index, prompted, prompts = index.to(device), prompted.to(device), self._prompts
        return Drawing(
            sampler,
            seed=SAMPLE_SEED,
            index=index,
            shape=data.shape,
            labels=None if labels is None else labels.to(device),
            no_label=classes,
            conditions=(condition, dropped) if prompts is None else prompts.beside(condition, prompted, dropped),
        )

    def _condition(self, conditions: Conditions, inputs: Tensor) -> Condition:
        fields = {name: self._field(name, inputs) for name in conditions.reads}
        return conditions.at_rest(fields, inputs.to(self._engine.device), self._scale)

    def _field(self, name: str, inputs: Tensor) -> Tensor:
        read = self._store.fields[name].read(self._positions[inputs.numpy()])
        return torch.from_numpy(read).to(self._engine.device)

    def _beside(self, drawn: Tensor) -> Drawn:
        fields = self._store.meta.fields
        names, given = (fields[name].channels if name in fields else () for name in ("images", "condition"))
        names = names if self._spec.data.are_fields else ()
        if self._conditions is None or not self._conditions.reads:
            return Drawn(drawn, channels=names, prompts=() if self._prompts is None else self._prompts.texts)
        inputs = torch.arange(min(self.count // self.members, MOST_ROWS))
        condition, images = self._condition(self._conditions, inputs), self._field("images", inputs)
        if self._coder is None:
            shown = self._conditions.shown(condition, self._scale)
            truths = Moves(self._spec.data.size).of(images).float().cpu()
        else:
            with self._watchdog.pause():
                shown = condition_pixels(self._coder, self._conditions.spec, condition.channels).float()
                truths = self._coder.decode(images).float().cpu()
        return Drawn(drawn, self.members, shown, truths, names, given)


def prompts_of(spec: RunSpec, encoded: EncodedPrompts | None, device: torch.device) -> Prompts | None:
    """Return the prompts of a run's pictures, which rank 0 has ``encoded``; None if there are none. Collective."""
    unet, text = spec.unet.text, spec.data.text
    if unet is None or text is None or spec.samples.every_images is None:
        return None
    texts = broadcast_object(() if encoded is None else encoded.texts, tuple[str, ...])
    shapes: list[tuple[int, ...]] = [(unet.tokens, unet.context_channels)]
    shapes += [] if unet.pooled_channels is None else [(unet.pooled_channels,)]
    given = [] if encoded is None else [part for part in encoded.whole if part is not None]
    parts = []
    for number, shape in enumerate(shapes):
        whole = torch.empty(len(texts) + 1, *shape, dtype=torch.float16)
        if given:
            whole.copy_(given[number])
        broadcast(whole)
        parts.append(whole.to(device))
    known = EncodedPrompts(texts, Encoded(*parts))
    against = no_text(text, known.empty)
    return Prompts(unet, known.encoded, against, size=pixels_of(spec.data).size, device=device, texts=known.texts)


def measured(
    held_out: HeldOutLoss, engine: UnetPipelineEngine, watchdog: Watchdog, stops: Stops = lambda: False
) -> dict[str, float]:
    """Measure a held-out loss, whose calls the replicas share; raises Stopped if the run is asked to stop. Collective.

    First stages read the images and get the values, others an empty dictionary.
    """
    replica, replicas = engine.replica, engine.replicas
    sums, module, pipeline = held_out.zeros(), engine.module, ForwardPipeline(engine, held_out.images)
    sized = len(module.sized_layers) > 1

    def run(calls: Sequence[int]) -> None:
        pipeline.run(
            len(calls),
            lambda number: held_out.inputs(calls[number]),
            lambda number, prediction: held_out.add(sums, calls[number], prediction),
            context=lambda number: held_out.context(calls[number]),
            sizes=[module.size_number(held_out.size(number)) for number in calls] if sized else (),
            depth=len(calls),
            progress=watchdog.progress,
        )

    for turns in _parts(range(-(-held_out.calls // replicas)), stops):  # as many on every replica
        run([call for turn in turns if (call := turn * replicas + replica) < held_out.calls])
    if not engine.is_first_stage():
        return {}
    if module.space.rank:
        sums.zero_()  # the first rank has counted the same images
    dist.all_reduce(sums, group=engine.grid.get_data_parallel_group())
    return held_out.values(sums)


@dataclass(frozen=True)
class Validation:
    """Draws samples and measures the held-out loss when they are due; all methods are collective over all ranks."""

    draw_every: int | None
    measure_every: int | None
    """Images between two pictures, and between two losses; None for none."""
    engine: UnetPipelineEngine
    ema: Ema
    held_out: HeldOutLoss | None
    """None if no images are held out."""
    previews: Previews
    watchdog: Watchdog
    recorder: Recorder
    stops: Stops
    picture_seconds: float = 0.0
    """Predicted time of a picture; rank 0's counts."""

    def due(self, before: int, done: bool) -> tuple[bool, bool]:
        """Return whether samples, and whether the held-out loss are due after the step from ``before`` images on."""
        seen, every = self.engine.images_seen, None if self.held_out is None else self.measure_every
        return is_due(self.draw_every, before, seen, done), is_due(every, before, seen, done)

    def after_step(self, before: int, done: bool) -> None:
        """Draw the samples and measure the loss that are due, unless the run is asked to stop meanwhile."""
        begin = time.perf_counter()
        samples, losses = self.due(before, done)
        with self._averaged():
            if samples:
                self._draw(begin)
            if losses and self.held_out is not None:
                begin_measuring = time.perf_counter()
                with self.recorder.doing("measuring the held-out loss"):
                    values = measured(self.held_out, self.engine, self.watchdog, self.stops)
                values["usage/evaluation_seconds"] = time.perf_counter() - begin_measuring
                self.recorder.evaluation(values, self.engine.global_steps)

    def before_first_step(self) -> None:
        """Draw the samples of the initial weights, unless samples are off or slow, or the run is resumed."""
        if self.draw_every is None or self.engine.global_steps:
            return
        if broadcast_object(self.picture_seconds > FIRST_PICTURE_SECONDS, bool):
            about = duration(self.picture_seconds)
            self.recorder.log(f"no picture before the first step: it would take about {about}")
            return
        begin = time.perf_counter()
        with self._averaged():
            self._draw(begin)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Use the averaged weights inside this context, which ends early if the run is asked to stop."""
        try:
            with self.ema.applied():
                yield
        except Stopped:
            self.recorder.log("asked to stop: pictures and held-out loss of this point are left out")

    def _draw(self, begin: float) -> None:
        with self.recorder.doing("drawing samples"):
            drawn = self.previews.draw()
        seconds = time.perf_counter() - begin
        self.recorder.samples(drawn, seconds, self.engine.images_seen, self.engine.global_steps)

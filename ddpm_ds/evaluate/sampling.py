"""Sampling from trained weights: one batch, some images from Python, or many batches that an interruption keeps.

Weights, sampler, seed, an image's number and its label determine the image, up to rounding.
"""

import contextlib
import functools
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
import torch.distributed as dist
from pydantic import Field, InstanceOf
from torch import Tensor
from tqdm import tqdm

from ddpm_ds.data.captions import PROMPTS, EncodedPrompts
from ddpm_ds.data.spec import TextSpec
from ddpm_ds.data.text import TextEncoders, misfit
from ddpm_ds.diffusion.condition import Prompts
from ddpm_ds.diffusion.levels import check_guidance
from ddpm_ds.diffusion.samplers import Drawing, Sampler
from ddpm_ds.diffusion.spec import SamplerSpec, check_sampler
from ddpm_ds.evaluate import USUAL_COUNT, USUAL_MEMBERS
from ddpm_ds.evaluate.inputs import Inputs, check_unconditioned
from ddpm_ds.evaluate.outputs import DrawnImages, Request
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.ground import errors
from ddpm_ds.ground.device import share_threads
from ddpm_ds.ground.errors import EvaluationError, LayoutError, SpecError, is_out_of_memory, print_to_stderr
from ddpm_ds.ground.units import MOST_COUNT, MOST_IMAGE, MOST_MEMBERS, MOST_SEED
from ddpm_ds.processes.hosts import use_interface_towards
from ddpm_ds.schema.choices import OBJECTIVES
from ddpm_ds.schema.layout import SpaceSplit
from ddpm_ds.schema.types import Batch, GivenPath
from ddpm_ds.unet.layers import Layer
from ddpm_ds.unet.model import UNet
from ddpm_ds.unet.shards import layers_of_rank, row_layers, rows_fault
from ddpm_ds.unet.space import SpaceGroup

AHEAD = 2**49
"""Number that is added to an image's number for each further state; larger than every image number."""
LOG_SECONDS = 30.0
"""Seconds between two lines of the progress bar if there is no terminal."""
MOST_PROMPT = 10_000
"""Maximum number of characters of a prompt."""


class SpaceRanks:
    """Processes of this host that share the rows of each image: a space group, of which this process is rank 0.

    Rank 0 sends weights and inputs and gets whole predictions; it alone draws noise, reads and writes. The others start
    at the first prediction and end with the context; if one is lost, so is rank 0. Raises LayoutError: there are fewer
    GPUs than ``size``.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        if device.type == "cuda" and (gpus := torch.cuda.device_count()) < size:
            raise LayoutError(f"--space {size}: PyTorch finds {gpus} CUDA devices; use --space {gpus} or --device cpu")
        self._device, self._space = device, SpaceGroup(0, size)
        self._others = list[tuple[BaseProcess, Connection]]()
        self._shared = dict[tuple[UNet, tuple[Layer, ...]], UNet]()
        self._known = list[tuple[UNet, tuple[Layer, ...]]]()

        def watch() -> None:
            multiprocessing.connection.wait([process.sentinel for process, _ in self._others])
            if self._others:  # a message to the one that has ended would wait for ever
                fix = "see the error above, or use a smaller --batch-images"
                print_to_stderr(f"{errors.COMMAND_ERROR}a process that shares the images with --space has ended; {fix}")
                os._exit(errors.EXIT_PEER_LOST)

        self._watching = threading.Thread(target=watch, daemon=True)

    def share(self, trained: Trained) -> Trained:
        """Return the same weights, which predict with all ranks; raises SpecError if images have too few rows."""
        if (size := self._space.size) == 1:
            return trained
        if found := rows_fault(trained.layers, SpaceSplit(size), range(1, size)):
            raise SpecError(f"--space {size}: {found[0]}; use --space {found[1][-1]}")
        if (key := (trained.unet, trained.layers)) not in self._shared:
            self._shared[key] = unet = _part(trained.layers, self._space, trained.unet.state_dict())
            unet.register_forward_pre_hook(functools.partial(self._tell, key), with_kwargs=True)
        return replace(trained, unet=self._shared[key])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._others and kind is not None and issubclass(kind, RuntimeError):
            self._watching.join(2.0)  # which ends this process if messages failed since another has ended
        others, self._others = self._others, []
        for process, _ in others:
            process.kill()
            process.join()
        if others:
            dist.destroy_process_group()

    def _tell(self, key: Any, unet: UNet, inputs: Sequence[Tensor], named: dict[str, Tensor | None]) -> None:
        """Let the others predict too, by a U-Net for images of some size whose weights they may have."""
        if not self._others:
            self._start()
        if key not in self._known:
            alike = [number for number, (source, _) in enumerate(self._known) if source is key[0]]
            self._send((key[1], alike[:1]), {} if alike else unet.state_dict())
            self._known.append(key)
        self._send(self._known.index(key), {f"input{n}": each for n, each in enumerate(inputs)} | named)

    def _send(self, what: tuple[Sequence[Layer], list[int]] | int, tensors: Mapping[str, Tensor | None]) -> None:
        """Send the layers of a U-Net with its weights, or one with the same, or the number of one with its inputs."""
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        for _, pipe in self._others:
            pipe.send((what, {name: (tensor.shape, tensor.dtype) for name, tensor in given.items()}))
        for tensor in given.values():
            dist.broadcast(tensor.contiguous(), 0)

    def _start(self) -> None:
        context, size = multiprocessing.get_context("spawn"), self._space.size
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all, and rank 0 heeds it
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(1, size):
                pipe, theirs = context.Pipe()
                device = self._device if self._device.type == "cpu" else torch.device("cuda", rank)
                process = context.Process(target=_follow, args=(rank, size, device, folder, theirs), daemon=True)
                process.start()
                self._others.append((process, pipe))
            signal.signal(signal.SIGINT, before)
            self._watching.start()
            _join(self._space, self._device, folder)


def _join(space: SpaceGroup, device: torch.device, folder: str) -> None:
    """Join the other ranks of a space group, which meet in a ``folder``."""
    share_threads(device, space.size)
    use_interface_towards("127.0.0.1")
    store, backend = dist.FileStore(f"{folder}/store", space.size), "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=space.rank, world_size=space.size)
    space.group = dist.group.WORLD
    dist.barrier()  # then no rank needs the folder


def _part(layers: Sequence[Layer], space: SpaceGroup, weights: Mapping[str, Tensor]) -> UNet:
    """Return a rank's part of the U-Net of whole ``layers``."""
    unet = UNet(layers_of_rank(row_layers(layers, SpaceSplit(space.size)), space.rank), 0, space)
    unet.eval().requires_grad_(False).load_state_dict(weights, assign=True)
    return unet


def _follow(rank: int, size: int, device: torch.device, folder: str, pipe: Connection) -> None:
    """Predict with rank 0 of :class:`SpaceRanks`, as it tells over ``pipe``, until it has ended."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    space, unets = SpaceGroup(rank, size), list[UNet]()
    _join(space, device, folder)
    with torch.inference_mode():
        while True:
            try:
                what, kinds = pipe.recv()
            except EOFError:
                os._exit(0)
            given = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in kinds.items()}
            for tensor in given.values():
                dist.broadcast(tensor, 0)
            if isinstance(what, int):
                context = given.pop("context", None)
                unets[what](*given.values(), context=context)
            else:
                layers, alike = what
                unets.append(_part(layers, space, unets[alike[0]].state_dict() if alike else given))


@dataclass(frozen=True)
class Setup:
    """Everything that images are drawn with, except their numbers, labels and seed."""

    trained: Trained
    sampler: SamplerSpec
    guide: Trained | None = None
    """U-Net that guides instead of "no label", see :class:`Drawing`."""
    inputs: Inputs | None = None
    """Inputs that images are drawn for; a U-Net with a condition of each image needs them."""
    prompts: Prompts | None = None
    """Prompts that images take in turn, for a U-Net that reads text."""

    def with_prompts(
        self, texts: Sequence[str] | None, negative: str | None, log: Callable[[str], None] = print
    ) -> Self:
        """Return a setup with the encoded prompts ``texts`` and ``negative``; for a U-Net without text the same setup.

        The default, which is logged, is the prompts of the run's own pictures, or else the empty text. Raises
        SpecError: prompts are given to a U-Net without text, or the negative prompt would have no effect.
        """
        trained = self.trained
        if trained.unet_spec.text is None:
            if texts is not None or negative is not None:
                fault = f"the U-Net of {trained.origin} reads no text (unet.text is null); leave it out"
                raise SpecError(f"--{'negative' if texts is None else 'prompt'}: {fault}")
            return self
        for text in (*(texts or ()), negative or ""):
            if len(text) > MOST_PROMPT:
                raise SpecError(f"a prompt has {len(text):,} characters; write {MOST_PROMPT:,} at most")
        if texts is not None and not texts:
            raise SpecError("prompts = [] has none; use None for the prompts of the run's own pictures")
        if negative is not None and (self.guide is not None or self.sampler.predictions == 1):
            why = f"--guidance is {self.sampler.guidance:g}" if self.guide is None else "another U-Net guides"
            raise SpecError(f'--negative "{negative}" has no effect, since {why}; leave one of them out')
        known = None
        if texts is None:
            known = None if trained.run_dir is None else EncodedPrompts.read(trained.run_dir / PROMPTS)
            own = known and f"the prompts of the run's own pictures, {len(known.texts):,} in {PROMPTS}"
            log(f"no prompt is given, so it draws for {own or 'the empty text'}")
        if known is None:
            known = EncodedPrompts.of(_encoding(trained), texts or ("",), trained.device, log, trained.learned_encoders)
        return replace(self, prompts=trained.prompts(known, negative))

    def request(self, labels: Sequence[int] | None, **fields: int | str) -> Request:
        """Return a request with the labels that images take in turn, and other ``fields`` such as ``seed``."""
        trained, guide = self.trained, self.guide if self.sampler.guidance != 1.0 else None
        return Request.model_validate(
            {
                **trained.identity,
                "guide": None if guide is None else guide.origin,
                "guide_digest": None if guide is None else guide.digest,
                "sampler": self.sampler.model_copy(update={"steps": self.sampler.steps_of(trained.diffusion)}),
                "labels": None if labels is None else tuple(labels),
                "inputs": None if self.inputs is None else self.inputs.key,
                "size": trained.other_size,
                "prompts": None if self.prompts is None else self.prompts.texts,
                "negative": None if self.prompts is None else self.prompts.negative,
                **fields,
            }
        )


def draw(
    setup: Setup,
    index: Tensor,
    *,
    labels: Tensor | None,
    seed: int = 0,
    members: int = 1,
    numbers: Sequence[int] | None = None,
    after_step: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Draw the images with the numbers ``index`` (N,) int64 as one batch; return (N, C, H, W) on the CPU, uint8, or
    float32 in physical units for fields.

    ``labels`` are (N,) int64, or None for no label. Image I is member I % ``members`` of input I // ``members``, unless
    ``numbers`` (N,) names its input. ``after_step`` gets the number of U-Net evaluations per image so far, and in all.
    Raises EvaluationError: an image is not finite.
    """
    trained, inputs = setup.trained, setup.inputs
    condition, dropped, base, placed, turn = None, None, None, index.to(trained.device), index
    with torch.inference_mode():
        if inputs is not None:
            turn = index // members if numbers is None else torch.tensor(numbers)
            numbers = turn.tolist()
            condition, base = inputs.condition(numbers, trained.device), inputs.base(numbers)
        elif trained.interface.condition_channels or trained.interface.numbers:  # constants, which need no inputs
            condition = trained.conditions.at_rest({}, placed, trained.scale)
        if condition is not None:
            dropped = trained.conditions.dropped(condition)
        drawing = Drawing(
            Sampler(setup.sampler, trained.process),
            seed=seed,
            index=placed,
            shape=trained.image_shape,
            labels=None if labels is None else labels.to(trained.device),
            no_label=trained.unet_spec.classes,
            conditions=(
                (condition, dropped)
                if setup.prompts is None
                else setup.prompts.beside(condition, turn.to(trained.device), dropped)
            ),
            guide=None if setup.guide is None else setup.guide.unet,
        )
        for number in range(drawing.calls):
            drawing.take(trained.unet(*drawing.inputs(), context=drawing.context(number)))
            if after_step is not None:
                after_step(sum(drawing.evaluations[: number + 1]), sum(drawing.evaluations))
        drawn = drawing.images()
        if (bad := ~drawn.isfinite().flatten(1).all(dim=1)).any():
            number = int(index[bad.cpu()][0])
            fault = f"image {number} of {trained.origin} is drawn with NaN or infinity by {setup.sampler.kind}"
            fix = "draw with other --steps or another --sampler, or from an earlier checkpoint"
            raise EvaluationError(f"{fault}; {fix}")
        images = trained.finished(drawn).cpu()
        return images if base is None else images + base


def sample(
    trained: InstanceOf[Trained],
    count: Annotated[int, Field(ge=1, le=MOST_COUNT)] | None = None,
    *,
    conditions: GivenPath | None = None,
    members: Annotated[int, Field(ge=1, le=MOST_MEMBERS)] | None = None,
    sampler: SamplerSpec | None = None,
    labels: Sequence[int] | Literal["all"] | None = "all",
    guide: InstanceOf[Trained] | None = None,
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] = 0,
    first: Annotated[int, Field(ge=0, le=MOST_IMAGE)] = 0,
    batch_images: Batch = 64,
    prompts: str | Sequence[str] | None = None,
    negative: str | None = None,
    progress: bool = False,
) -> Tensor:
    """Draw the images ``first`` to ``first + count - 1`` of a seed, 64 by default; return (count, C, H, W) on the CPU,
    uint8, or float32 in physical units for fields.

    With ``conditions``, a file or folder or ``"held-out"``, draw ``members`` (8; of a regression 1) for each of
    ``count`` of its inputs from the ``first`` on (all, 64 at most); return (count, members, C, H, W).
    ``ddpm-ds sample`` with the same values gives the same images, up to rounding. By default ``sampler`` is the run's.
    Images take ``labels`` in turn: by default every class, or for inputs their own labels; None means no label.
    Guidance leads away from ``guide``, a worse U-Net on the same device, if it is given. A U-Net with text draws for
    ``prompts``, which the images take in turn, by default one of each, and guidance leads away from ``negative``.
    ``batch_images`` are drawn at once; ``progress`` shows a bar.

    Raises:
        SpecError: the sampler does not fit the diffusion process or the U-Net, there is no such class, ``guide`` has
            other images, classes or noise levels.
        LayoutError: the device has no memory for ``batch_images`` at once.
    """
    sampler = sampler or trained.sampler
    try:
        check_sampler(sampler, trained.diffusion, guide=guide is not None, **trained.sampler_checks)
    except ValueError as error:
        raise SpecError(str(error)) from None
    check_guidance(sampler, trained.process)
    if guide is not None:
        check_guide(guide, trained, [sampler])
    if conditions is None:
        check_unconditioned(trained)
        if members is not None:
            raise SpecError(f"members = {members} needs conditions, which is None")
    inputs = None if conditions is None else Inputs.open(Path(conditions), trained)
    if labels is not None and not labels:
        raise SpecError("labels = [] names no class; use None to draw without labels")
    for label in labels or () if labels != "all" else ():
        check_label(label, trained.unet_spec.classes)
    texts = (prompts,) if isinstance(prompts, str) else prompts
    setup = Setup(trained, sampler, guide, inputs).with_prompts(texts, negative, print_to_stderr)
    numbers = {"seed": seed, "first": first, "batch_images": batch_images}
    request = request_for(setup, labels, count=count, members=members, **numbers)
    batches = tqdm(request.batches, desc="drawing", unit="batch", disable=None if progress else True)
    images = torch.cat([draw_batch(setup, request, batch) for batch in batches])
    return images if inputs is None else images.unflatten(0, (-1, request.members))


def request_for(
    setup: Setup,
    labels: Sequence[int] | Literal["all"] | None,
    *,
    first: int = 0,
    count: int | None = None,
    members: int | None = None,
    steps_ahead: int = 1,
    **numbers: int,
) -> Request:
    """Return the request for ``count`` images from the ``first`` on (None: 64, or one of each prompt), or with inputs
    for ``members`` (None: 8) of ``count`` inputs (None: all, 64 at most). ``numbers`` are ``seed`` and
    ``batch_images``.

    Images take ``labels`` in turn; ``"all"`` means every class or, with inputs, their own labels. Raises SpecError:
    there are no such inputs, a regression has several members, or there are more prompts than images.
    """
    trained, inputs = setup.trained, setup.inputs
    if inputs is None:
        if labels == "all":
            labels = None if trained.unet_spec.classes is None else range(trained.unet_spec.classes)
        prompts = 0 if setup.prompts is None else len(setup.prompts)
        if count is not None and count < prompts:
            raise SpecError(f"--count {count:,}: {prompts:,} prompts are an image each; use at least {prompts}")
        return setup.request(labels, first=first, count=count or prompts or USUAL_COUNT, **numbers)
    regresses = not OBJECTIVES[trained.diffusion.objective].diffuses
    if regresses and members not in (None, 1):
        raise SpecError(f"--members {members}: a regression draws one image of each input; use 1")
    members = members or (1 if regresses else USUAL_MEMBERS)
    prompts, there = 0 if setup.prompts is None else len(setup.prompts), len(inputs)
    if prompts and there == 1:  # is drawn for each of them
        there = max(prompts, first + (count or 1))
    count = count or min(there - first, USUAL_COUNT)
    if not 0 < count <= there - first:
        fault = f"--conditions has {len(inputs):,} inputs; name some of these"
        raise SpecError(f"--first {first} and --count {count:,}: {fault}")
    if labels == "all":
        labels = None if inputs.labels is None else inputs.labels.tolist()
    numbers |= {"first": first * members, "count": count * members, "members": members, "steps_ahead": steps_ahead}
    return setup.request(None if labels is None else [label for label in labels for _ in range(members)], **numbers)


def draw_batch(
    setup: Setup, request: Request, index: Sequence[int], after_step: Callable[[int, int], None] | None = None
) -> Tensor:
    """Draw the images ``index`` of a request as one batch, (N, C, H, W), or several steps ahead, (N, steps, C, H, W).

    Each state is the input of the next one, and has noise of its own.
    """
    states: list[Tensor] = []
    labels, numbers = request.labels_of(index), None
    with fitting(request.batch_images):
        for step in range(request.steps_ahead):
            at, how = torch.tensor(index) + step * AHEAD, {"seed": request.seed, "members": request.members}
            states.append(draw(setup, at, labels=labels, numbers=numbers, after_step=after_step, **how))
            if request.steps_ahead > 1:
                setup = replace(setup, inputs=Inputs.of_states(setup.trained, states[-1]))
                numbers = range(len(index))
    return torch.stack(states, dim=1) if request.steps_ahead > 1 else states[0]


@contextlib.contextmanager
def fitting(batch_images: int) -> Iterator[None]:
    """Turn a lack of memory in the body into a LayoutError about ``batch_images``."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fault = "the device has no memory for so many images at once; use fewer"
        raise LayoutError(f"--batch-images = {batch_images}: {fault}") from None


def _encoding(trained: Trained) -> TextSpec:
    """Return how prompts are encoded; raise SpecError if the encoders are missing, or of another width."""
    text, unet = trained.text, trained.unet_spec.text
    assert unet is not None
    if text is None:
        fix = "add tokenizer and text_encoder (SDXL: also tokenizer_2, text_encoder_2) of its pipeline"
        raise SpecError(f"{trained.origin} holds no text encoder, which prompts need; {fix}")
    encoders = TextEncoders.open(text, None)
    if trained.spec is None:  # the configuration of diffusers' U-Net does not say its number of tokens
        unet = unet.model_copy(update={"tokens": encoders.tokens})
    if (wrong := misfit(encoders, unet)) is not None:
        key, wanted, found = wrong
        fault = f"the encoders at {text.encoders} have {found or 'none'}; put its own there"
        raise SpecError(f"unet.text.{key} = {wanted} of {trained.origin}, but {fault}")
    return text


def check_label(label: int | str, classes: int | None, option: str = "--labels") -> None:
    """Raise SpecError unless the label is one of the U-Net's classes."""
    if classes is None:
        raise SpecError(f"{option} {label}: the U-Net has no classes (unet.classes is null); leave it out")
    if not 0 <= int(label) < classes:
        raise SpecError(f"{option} {label} is out of range: the U-Net has {classes} classes, 0 to {classes - 1}")


def check_guide(guide: Trained, trained: Trained, samplers: Sequence[SamplerSpec]) -> None:
    """Raise SpecError unless ``guide`` has the images, classes and process of ``trained``, and a sampler guides."""
    if all(sampler.guidance == 1.0 for sampler in samplers):
        raise SpecError(f"--guide {guide.origin} guides nothing at --guidance 1; give another, such as 2")
    mine, its = (
        {
            "weights (device, dtype)": (one.device, one.dtype),
            "images (C, H, W)": one.image_shape,
            "channels and numbers of data.condition": (one.interface.condition_channels, one.interface.numbers),
            "an autoencoder with checksum": one.autoencoder and one.autoencoder.digest[:8],
            "unet.classes": one.unet_spec.classes,
            "text (tokens, width, pooled width)": (text := one.unet_spec.text)
            and (text.tokens, text.context_channels, text.pooled_channels),
            **{f"diffusion.{key}": value for key, value in one.diffusion.process_values().items()},
        }
        for one in (trained, guide)
    )
    for key in [*mine, *its]:
        if (wanted := mine.get(key)) != (found := its.get(key)):
            fault = f"has {key} = {found}, and {trained.origin} has {wanted}; name a guide with the same"
            raise SpecError(f"--guide {guide.origin} {fault}")


def draw_missing(setup: Setup, request: Request, drawn: DrawnImages) -> None:
    """Draw the missing images of a request, made for ``setup``, and show a progress bar."""
    if done := drawn.count:
        print(f"{done:,} of {request.count:,} images are there from before", flush=True)
    with tqdm(
        total=request.count,
        initial=drawn.count,
        unit=" images",
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]",
        mininterval=0.2 if sys.stderr.isatty() else LOG_SECONDS,
        miniters=0,
        smoothing=0,  # batches finish seldom, so the rate is the mean since the start
    ) as bar:

        def show(done: int, evaluations: int) -> None:
            bar.set_postfix_str(f"evaluation {done}/{evaluations}", refresh=False)
            bar.update(0)

        for batch in drawn.missing():
            drawn.keep(batch, draw_batch(setup, request, batch, show))
            bar.update(drawn.count - bar.n)

"""Start of a run on one process: it meets the other ranks, checks that they have the same software, files and images
and a GPU each, and joins the process group::

    meet ──▶ Rendezvous ──▶ shared_images ──▶ Images ──▶ started ──▶ Prepared, Watchdog
"""

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddpm_ds.checkpoint.folder import CompleteCheckpoint, agreed
from ddpm_ds.checkpoint.manifest import Description
from ddpm_ds.config.spec import RunSpec, SamplesSpec, check_picture
from ddpm_ds.data.cache import DatasetCache, Subset
from ddpm_ds.data.captions import PROMPTS, EncodedPrompts, first_captions
from ddpm_ds.data.held_out import checksums_of, parts, prepare_all
from ddpm_ds.data.latents import check_steps, pixels_of
from ddpm_ds.data.prepare import How
from ddpm_ds.data.spec import TextSpec
from ddpm_ds.data.text import check_text
from ddpm_ds.ground.device import DTYPES, MESSAGE_ENVIRONMENT, share_threads
from ddpm_ds.ground.errors import HostError, SpecError, one_line
from ddpm_ds.ground.units import gib
from ddpm_ds.pipeline.build import use_host_accelerator
from ddpm_ds.pipeline.messages import barrier
from ddpm_ds.planning.run_plan import RunDraft, RunPlan
from ddpm_ds.processes.hosts import REMEDIES, facts
from ddpm_ds.processes.process_group import group_timeout, process_group
from ddpm_ds.processes.rendezvous import Rendezvous
from ddpm_ds.processes.watchdog import DeviceWork, Watchdog
from ddpm_ds.schema.choices import SOURCES
from ddpm_ds.schema.section import flatten
from ddpm_ds.schema.types import written
from ddpm_ds.tracking.progress import ProgressLine, activity
from ddpm_ds.tracking.run_folder import disk_errors_reported
from ddpm_ds.training import resume
from ddpm_ds.training.asked import Asked
from ddpm_ds.training.saving import described
from ddpm_ds.unet.model import check_compiler, choose_kernels
from ddpm_ds.unet.operations import widening

MOST_CAPTIONS = 64
"""Maximum number of captions that the pictures of a run take in turn."""
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable that lets ranks share a GPU, experimentally, in NCCL 2.30 and later."""
MOST_NAMED = 3
"""Maximum number of differences that a message names."""


class Images(NamedTuple):
    """Training images and held-out images of a run, the same on all ranks."""

    trained: Subset
    held_out: Subset
    checksums: dict[str, str]


@dataclass(frozen=True)
class Prepared:
    """Inputs of a run, checked on all ranks."""

    device: torch.device
    images: Images
    claim: resume.Claim
    checkpoint: CompleteCheckpoint | None
    """Checkpoint that the run resumes from; None starts anew."""
    about: Description
    changed: list[str]
    """Settings that have changed since that checkpoint, by dotted key."""
    initial: resume.InitialWeights | None
    prompts: EncodedPrompts | None
    """Prompts of the run's pictures, on rank 0 alone; None in a run without text."""


def meet(draft: RunDraft, device: torch.device, asked: Asked, progress: ProgressLine | None) -> Rendezvous:
    """Meet the other ranks, with this process on ``device``. Collective.

    UserError if they would run something else or share a GPU, or if the device lacks kernels or a compiler.
    """
    use_host_accelerator()
    share_threads(device)
    with activity(progress, "waiting for all processes"):
        rendezvous = Rendezvous(asked.start_seconds)
    with rendezvous.reporting():
        documents = {str(draft.spec_path): draft.spec.model_dump(mode="json"), str(draft.ds_path): draft.ds.as_json()}
        check_alike(rendezvous, documents, draft.bounds, device.type)
        mixed_gpus = check_gpus(rendezvous, device)
        choose_kernels(draft.ds.config.kernels, device)  # raises if they can't run
        if draft.ds.config.compile:
            check_compiler(device)
        if rendezvous.rank == 0:
            for notice in filter(None, (mixed_gpus, widening(device.type, DTYPES[draft.ds.precision][1]))):
                print(notice, flush=True)
    return rendezvous


def shared_images(spec: RunSpec, run_dir: Path, resume_from: str, rendezvous: Rendezvous) -> Images:
    """Prepare the images together, once on each host, and check that all hosts have the same. Collective."""
    check_text(spec.data.text, spec.unet.text)
    check_steps(spec.data, len(spec.unet.multipliers))
    first_on_host = int(os.environ["LOCAL_RANK"]) == 0
    own = resume.images_learned(run_dir, resume_from) if first_on_host else None
    learned = (one["checksums"] for one in rendezvous.agree("learned", {"checksums": own}))
    store, held_out = prepare_all(
        spec.data,
        How(progress=first_on_host, verify=None if first_on_host else False),
        learned=next(filter(None, learned), None),
        group=spec.bucket_group or 1,
    )
    check_store(store, spec, held_out)
    checksums = checksums_of(store, held_out)
    remedy = "give all hosts the same images, or a data.store_root that all of them see"
    _check(rendezvous, "prepared images: ", rendezvous.agree("images", checksums), remedy)
    return Images(*parts(spec.data, store, held_out), checksums)


@contextlib.contextmanager
def started(
    plan: RunPlan,
    images: Images,
    run_dir: Path,
    device: torch.device,
    asked: Asked,
    rendezvous: Rendezvous,
    progress: ProgressLine | None,
) -> Iterator[tuple[Prepared, Watchdog]]:
    """Start a run on ranks that have met; the body trains it, in the process group and watched. Collective.

    Rank 0's ``run_dir`` counts; ``progress`` is None on all ranks but 0. UserError if something given is wrong, here or
    on another host; PeerLostError if another rank is gone.
    """
    log: Callable[[str], None] = progress.log if progress is not None else lambda line: None
    rank, gather, spec = rendezvous.rank, resume.gather_in(rendezvous), plan.spec
    with rendezvous.reporting(), disk_errors_reported(run_dir), activity(progress, "checking the run's files"):
        claim = resume.claim_run(run_dir, rank, rendezvous.hosts, gather)  # before anything in it is read
        about = described(spec, plan.ds, plan.layers, images.checksums, images.trained.cache.meta.facts)
        checkpoint = agreed(partial(resume.find_checkpoint, claim.run_dir, asked.resume, log), rank, gather)
        changed, initial, prompts = list[str](), None, None
        if checkpoint is not None:
            changed = resume.check_resume(checkpoint, about, claim.run_dir)
            log(f"resuming from {checkpoint.path}")
            for change in changed:
                log(f"  changed since: {change}")
        elif spec.train.initial_weights is not None:
            own = slice(int(os.environ["LOCAL_RANK"]), None, int(os.environ["LOCAL_WORLD_SIZE"]))
            dtype = DTYPES[plan.ds.precision][1]
            initial = resume.InitialWeights(spec.train.initial_weights, about.parameters, dtype, own)
        if rank == 0 and spec.data.text is not None and spec.samples.every_images is not None:
            prompts = _prompts(spec.data.text, spec.samples, images, claim.run_dir / PROMPTS, device, log)
        rendezvous.agree("ready", {})
        if rank == 0 and (left := resume.remove_abandoned_points(claim.run_dir, checkpoint, about)):
            log(left)
    names = []
    for each in range(rendezvous.world_size):
        stage, _, part = plan.grid.coordinates(each)
        names.append(rendezvous.name(each, stage, part if plan.grid.tensor > 1 else None))
    dead, hang = asked.dead_seconds, asked.hang_seconds
    work = DeviceWork(torch.cuda.current_stream(device).query) if device.type == "cuda" else None
    with contextlib.ExitStack() as group:
        with Watchdog(rank, names, rendezvous.store, dead_seconds=dead, hang_seconds=hang, work=work) as watchdog:
            # watched, since PyTorch waits past any time limit for a rank that can't connect
            group.enter_context(process_group(group_timeout(hang, dead)))
            rendezvous.close()
            yield Prepared(device, images, claim, checkpoint, about, changed, initial, prompts), watchdog
        barrier()


def _prompts(
    text: TextSpec, samples: SamplesSpec, images: Images, file: Path, device: torch.device, log: Callable[[str], None]
) -> EncodedPrompts:
    """Return the prompts of the pictures; a resumed run keeps those of its ``file``."""
    prompts = samples.prompts
    if not prompts:
        store, positions = images.held_out if len(images.held_out.positions) else images.trained
        positions = positions[: min(samples.count, MOST_CAPTIONS)]
        if not text.encoded_in_training:
            return EncodedPrompts.of_captions(store, positions)
        prompts = first_captions(store, positions, text.tags)
    if (kept := EncodedPrompts.read(file)) is not None and kept.texts == prompts:
        return kept
    return EncodedPrompts.of(text, prompts, device, log)


def check_store(store: DatasetCache, spec: RunSpec, held_out: DatasetCache | None = None) -> None:
    """Check that the images fit the spec's U-Net; SpecError if classes differ, too many images are held out, or decoded
    pictures would be too large.
    """
    held_out = held_out or store
    try:
        check_picture(spec.samples, pixels_of(spec.data).size)
    except ValueError as error:
        raise SpecError(str(error)) from None
    trained, others = parts(spec.data, store, held_out)
    shown = (others if len(others.positions) else trained).of_size(spec.data.size)
    if spec.data.buckets and spec.data.condition and spec.samples.every_images and not len(shown.positions):
        raise SpecError(
            f"samples.every_images = {spec.samples.every_images} draws for the conditions of images of "
            f"data.image_size = {written(spec.data.size)}, and its bucket has none; use null, or another size"
        )
    classes, asked = len(store.meta.classes), spec.unet.classes
    if asked not in (None, classes):
        if store.meta.classes == (".",):
            fix = f"{SOURCES[spec.data.source].labels}, or --set unet.classes=null"
            raise SpecError(f"unet.classes = {asked}, but the images have no labels; {fix}")
        raise SpecError(f"unet.classes = {asked}, but the images have {classes} classes; --set unet.classes={classes}")
    if asked is not None and held_out.meta.classes != store.meta.classes:
        pairs = itertools.zip_longest(held_out.meta.classes, store.meta.classes, fillvalue="missing")
        number, (theirs, ours) = next(one for one in enumerate(pairs) if len({*one[1]}) > 1)
        raise SpecError(
            f"data.held_out_path = {spec.data.held_out_path}: class {number} is {one_line(theirs)}, and that of "
            f"{spec.data.origin} is {one_line(ours)}; give both the same classes, or --set unet.classes=null"
        )


def check_alike(
    rendezvous: Rendezvous, documents: dict[str, dict[str, Any]], bounds: Sequence[int], device: str
) -> None:
    """Check that all ranks have the same documents, by name, cuts and type of device; HostError if not. Collective."""
    about = facts(documents) | {"chosen ": {"cuts": list(bounds[1:-1]), "device": device}}
    remedies = REMEDIES | {"chosen ": "give -p and --device, so that no host has to choose"}
    answers = rendezvous.agree("start", about)
    for title in about:
        remedy = remedies.get(title, "give all hosts the same file, --set and -p")
        _check(rendezvous, title, [one.get(title, {}) for one in answers], remedy)


def check_gpus(rendezvous: Rendezvous, device: torch.device) -> str | None:
    """Check that ranks have GPUs of their own and NCCL's settings alike; return a line if models differ. Collective."""
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(device)
    settings = {name: os.environ.get(name) for name in MESSAGE_ENVIRONMENT if name.startswith("NCCL_")}
    own = {"id": str(gpu.uuid), "model": f"{gpu.name} {gib(gpu.total_memory)}", "settings": settings}
    all_gpus = rendezvous.agree("gpus", own)
    settings_of_all, remedy = [one["settings"] for one in all_gpus], "set it alike everywhere, as in .deepspeed_env"
    _check(rendezvous, "", settings_of_all, remedy)
    owners = dict[str, int]()
    for rank, one in enumerate(all_gpus):
        if (owner := owners.setdefault(one["id"], rank)) != rank and os.environ.get(SHARED_GPU, "0") == "0":
            raise HostError(
                f"{rendezvous.host_of(owner)} and {rendezvous.host_of(rank)} share one GPU "
                f"({one['model']}, {one['id']}), and NCCL needs one for each rank; start a host once, with as many "
                "processes as GPUs"
            )
    models = Counter(one["model"] for one in all_gpus)
    if len(models) == 1:
        return None
    named = ", ".join(f"{count} x {model}" for model, count in models.items())
    return f"GPUs of several models ({named}): each step waits for the slowest, and the smallest has to hold its stage"


def _check(rendezvous: Rendezvous, title: str, answers: Sequence[Mapping[str, Any]], remedy: str) -> None:
    def short(value: str | None) -> str:
        return "unset" if value is None else value[:12] if len(value) == 64 else value  # of a checksum the first digits

    first = flatten(answers[0])
    for rank, other in enumerate(map(flatten, answers)):
        found = [
            f"{title}{key} is {short(other.get(key))}, not {short(first.get(key))}"
            for key in {**first, **other}
            if first.get(key) != other.get(key)
        ]
        if found:
            more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
            named = f"{'; '.join(found[:MOST_NAMED])}{more}"
            raise HostError(f"{rendezvous.host_of(rank)} differs from {rendezvous.host_of(0)}: {named}; {remedy}")

"""Verbs that come before training: ``init``, ``prepare`` and ``schema``."""

import contextlib
import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ddpm_ds.cli.options import SpecOptions, Verb, Verbs, take_files
from ddpm_ds.config.ds_config import DS_CONFIGS
from ddpm_ds.config.spec_file import SPECS, load_spec, preset, presets
from ddpm_ds.ground.errors import DataError, OutputError, SpecError
from ddpm_ds.ground.files import read_bytes, write_file
from ddpm_ds.ground.options import flag, option
from ddpm_ds.ground.units import counted
from ddpm_ds.processes.ranks import set_environment
from ddpm_ds.processes.supervisor import gpus
from ddpm_ds.tracking.run_folder import DS_CONFIG, SPEC

SCHEMA = "run.schema.json"
"""JSON schema that the first line of every spec names; editors complete keys with it."""
TRAIN = f"ddpm-ds train --spec {SPEC} --deepspeed_config {DS_CONFIG} --run-dir runs/first"
SAMPLE = "ddpm-ds sample runs/first"
NEEDS_PATH = re.compile(r"^( +source: folder) +# needs --set data\.path=FOLDER( .*)?$", re.MULTILINE)
"""Line of a preset whose user has to name the pictures' folder."""
BATCHES, MOST_HELD_OUT = (8, 16, 32), 256
"""Batches without a GPU, of which the largest takes a tenth of the pictures; and the most pictures held out."""
README = """\
# {about}

`ddpm-ds init` wrote this folder. `{spec}` says what is trained (`ddpm-ds schema --markdown` explains every key),
`{ds_config}` how (`ddpm-ds schema ds_config --markdown`).

{data}

Typed in this folder:

{commands}
"""


class Kind(NamedTuple):
    """Training job that ``init`` begins; ``spec`` and ``ds_config`` are names of presets."""

    about: str
    spec: str
    ds_config: str
    data: str
    """Sentences on the data, and on packages to install first."""
    commands: tuple[str, ...]
    example: str | None = None
    """Script of ``launch/examples`` that makes data."""
    pictures: str = ""
    """Folder that the user fills with pictures."""


PREPARE, ENCODE = f"ddpm-ds prepare --spec {SPEC}", f"ddpm-ds prepare --encode --spec {SPEC}"
IMPORT = f"ddpm-ds import stabilityai/stable-diffusion-xl-base-1.0 --spec {SPEC} --out imported"
SDXL = (IMPORT, *(command.replace(f"--spec {SPEC}", f"--spec imported/{SPEC}") for command in (ENCODE, TRAIN)))
MEMBERS = f"{SAMPLE} --conditions held-out --members 4 --count"
OWN = f"Put your pictures (PNG, JPEG, WebP) into `pictures`, or write their folder where `{SPEC}` says `path`."
CAPTIONED = f"{OWN} Captions are in `metadata.jsonl`, or beside each picture in a text file of its name."
CROPS = f"Put pictures of 32x32 pixels or more into `crops`, or write their folder where `{SPEC}` says `path`."
FIELDS = f"A script makes temperatures. For your own write file and arrays where `{SPEC}` says `path` and `variables`."
SHAPES = "A script makes pictures, captions and encoders. `pip install 'ddpm_ds[text]'` first."
KINDS = {
    "digits": Kind(
        "Handwritten digits, in minutes on two CPU cores",
        *("digits", "zero2_fp16", "The digits come with scikit-learn."),
        (TRAIN, SAMPLE, "ddpm-ds diagnose runs/first"),
    ),
    "images": Kind(
        "Pictures of your own, at 64x64 pixels, or without a GPU at 32x32",
        *("folder", "zero2_bf16", OWN, (PREPARE, TRAIN, SAMPLE), None, "pictures"),
    ),
    "latents": Kind(
        "Pictures of your own, at 256x256 pixels by latents of an autoencoder",
        *("latent", "zero2_bf16", f"{OWN} `pip install 'ddpm_ds[latents]'` first."),
        *((ENCODE, TRAIN, SAMPLE), None, "pictures"),
    ),
    "text": Kind(
        "Pictures of coloured shapes from captions, in minutes on two CPU cores",
        *("tiny_text", "zero1_fp32", SHAPES, ("python make_text.py", ENCODE, TRAIN), "make_text.py"),
    ),
    "sdxl": Kind(
        "SDXL, fine-tuned on captioned pictures of your own",
        *("sdxl", "zero2_bf16", f"{CAPTIONED} `pip install 'ddpm_ds[text,latents]'` first.", SDXL, None, "pictures"),
    ),
    "upscaling": Kind(
        "Large pictures from small ones",
        *("upscaling", "zero0_fp32", f"{CROPS} The last 96, by name, are held out."),
        *((PREPARE, TRAIN, f"{MEMBERS} 6"), None, "crops"),
    ),
    "fields": Kind(
        "Fine fields from coarse ones, in minutes on two CPU cores",
        *("downscaling", "zero0_fp32", FIELDS, ("python make_fields.py", TRAIN, f"{MEMBERS} 4"), "make_fields.py"),
    ),
}
SMALL = {
    "images": KINDS["images"]._replace(
        about="Pictures of your own, at 32x32 pixels, in minutes on two CPU cores",
        spec="folder32",
        ds_config="zero0_fp32",
    )
}
"""Kinds that begin with a smaller U-Net on a machine without a GPU."""


@dataclass(frozen=True)
class InitOptions:
    folder: Path = option("new or empty folder, which may have your pictures", "FOLDER", names=("folder",))
    kind: str = "digits"


@Verb
def init(options: InitOptions) -> None:
    """Write a folder to begin in, with a spec, a JSON and commands.

    The folder has a run spec with comments, a DeepSpeed JSON, and a README.md with the next commands, which are printed
    too. Without an option they train handwritten digits. Without a GPU --images begins with a small U-Net, which fits
    the number of pictures that are already there.
    """
    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu" or not gpus()
    smaller, folder = SMALL.get(options.kind) if on_cpu else None, options.folder
    kind = smaller or KINDS[options.kind]
    files, written, own = _files(kind), list[Path](), folder / kind.pictures
    made = [each for each in dict.fromkeys((own, folder, *folder.absolute().parents)) if not each.exists()]
    lines, data = [f"{folder}: {', '.join(files)}"], kind.data
    try:
        if folder.exists() and any(each != own for each in folder.iterdir()):
            raise OutputError(f"{folder} is not empty; name a new or empty folder")
        own.mkdir(parents=True, exist_ok=True)
        if smaller is not None:
            lines.append(f"This machine has no GPU: {kind.about[:1].lower()}{kind.about[1:]}.")
            files[SPEC], data = fitted(files[SPEC], own) or (files[SPEC], data)
        for name, content in files.items():
            written.append(folder / name)
            write_file(folder / name, content)
    except OSError as error:
        with contextlib.suppress(OSError):
            for each in written:
                each.unlink(missing_ok=True)
            for each in made:
                each.rmdir()
        raise OutputError(f"{folder} can't be written ({error.strerror}); name a new or empty folder") from None
    print("\n".join([*lines, data, "", _typed([f"cd {shlex.quote(str(folder))}", *kind.commands])]))


def _typed(commands: Iterable[str]) -> str:
    return "\n".join(f"    {command}" for command in commands)


def _files(kind: Kind) -> dict[str, bytes]:
    """Return the files of a folder by name; raises SpecError if the package lacks its presets."""
    sources = {SPEC: (f"{kind.spec}.yaml", SPECS), DS_CONFIG: (f"{kind.ds_config}.json", DS_CONFIGS)}
    sources[SCHEMA] = (SCHEMA, SPECS)
    if kind.example is not None:
        sources[kind.example] = (kind.example, presets("launch/examples"))
    found = {name: read_bytes(preset(beside / source, beside)) for name, (source, beside) in sources.items()}
    path = f"path: {kind.pictures}"
    found[SPEC] = NEEDS_PATH.sub(rf"\1\n  {path:26}# your own folder\2", found[SPEC].decode()).encode()
    data = textwrap.fill(kind.data, 120)
    readme = README.format(about=kind.about, spec=SPEC, ds_config=DS_CONFIG, data=data, commands=_typed(kind.commands))
    return found | {"README.md": readme.encode()}


def fitted(spec: bytes, folder: Path) -> tuple[bytes, str] | None:
    """Return a spec with batch and held-out share for the pictures in ``folder``, and a line; None without pictures."""
    from ddpm_ds.data.sources.files import open_folder
    from ddpm_ds.data.spec import DataSpec

    try:
        count = len(open_folder(DataSpec(source="folder", path=folder, image_size=1, channels=3), progress=False).files)
    except DataError:
        return None
    batch = max(size for size in BATCHES if size == BATCHES[0] or 10 * size <= count)
    held_out = min(count // 10, MOST_HELD_OUT) // batch * batch
    values = {"batch_images": batch, "held_out_images": held_out}
    line = re.compile(rf"^  ({'|'.join(values)}): \d+ *", re.MULTILINE)
    text = line.sub(lambda old: f"  {old[1]}: {values[old[1]]}".ljust(len(old[0])), spec.decode())
    return text.encode(), f"Of {counted(count, 'picture')} {held_out} are held out; batches have {batch}."


def add_init(verbs: Verbs) -> None:
    """Add the verb ``init``, with a flag for each kind."""
    kinds = init.add(verbs).add_mutually_exclusive_group()
    for name, kind in KINDS.items():
        kinds.add_argument(f"--{name}", dest="kind", action="store_const", const=name, help=kind.about)


@dataclass(frozen=True)
class PrepareOptions(SpecOptions):
    encode: bool = flag("make latents of data.autoencoder and encode captions of data.text, on CUDA if there is any")
    residual: Path | None = option("make residuals of this regression, and set data.residual_of to it", "RUN_DIR")


@Verb
def prepare(options: PrepareOptions) -> None:
    """Write the images of a spec into the cache, from which runs train.

    Training does this by itself when the cache is missing. But only this verb makes latents and encoded captions
    (--encode), and residuals of a regression (--residual).
    """
    files = take_files(options)
    residual = [] if options.residual is None else [f"data.residual_of={json.dumps(str(options.residual))}"]
    spec = load_spec(files.spec, [*files.overrides, *residual])
    data = spec.data
    from ddpm_ds.data.held_out import prepare_all  # imports torch, so the spec is checked first
    from ddpm_ds.data.latents import check_steps
    from ddpm_ds.data.prepare import How
    from ddpm_ds.data.text import check_text

    encode_on = regression = None
    if options.encode and data.autoencoder is None and data.text is None:
        raise SpecError("--encode needs data.autoencoder or data.text, which are null; set one or leave it out")
    if options.encode or residual:
        set_environment()
        from ddpm_ds.evaluate.inputs import TrainedRegression
        from ddpm_ds.ground.device import choose_device

        device = choose_device("auto")
        encode_on = device if options.encode else None
        regression = TrainedRegression(data, device) if residual else None
    check_text(spec.data.text, spec.unet.text)
    check_steps(spec.data, len(spec.unet.multipliers))
    group = spec.bucket_group or 1
    cache, held_out = prepare_all(data, How(True, True, encode_on, regression), group=group)
    others = () if held_out is cache else held_out.caches
    for number, each in enumerate((*cache.caches, *others)):
        skipped = f", {each.meta.skipped:,} left out (skipped.txt)" if each.meta.skipped else ""
        what = "images" if data.residual_of is None else "residuals"
        if each.meta.kind == "latents":
            what = f"latents of {'x'.join(map(str, each.meta.shape))}"
        which = ", held out" if number >= len(cache.caches) else ""
        print(f"{each.path}: {len(each):,} {what}{which}{skipped}")


@dataclass(frozen=True)
class SchemaOptions:
    what: Literal["spec", "ds_config"] = option("default: spec", names=("what",), nargs="?", default="spec")
    markdown: bool = flag("print tables in Markdown instead of the schema")


@Verb
def schema(options: SchemaOptions) -> None:
    """Print the keys of a run spec or a DeepSpeed JSON.

    Prints the JSON schema, with which editors complete keys, or the tables of docs/spec.md and docs/ds_configs.md.
    """
    from ddpm_ds.config import ds_model, spec_file

    format = ds_model.DS_CONFIG if options.what == "ds_config" else spec_file.SPEC
    print(format.markdown() if options.markdown else json.dumps(format.file_schema(), indent=2) + "\n", end="")

"""``ddpm-ds init``: a folder to begin a training run in, from the specs and JSONs that come with this package."""

import argparse
import contextlib
import re
import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ddpm_ds.command_line import Verbs, file_path
from ddpm_ds.config.ds_config import DS_CONFIGS
from ddpm_ds.config.spec_file import SPECS
from ddpm_ds.errors import OutputError
from ddpm_ds.files import DS_CONFIG, SPEC, preset, presets, read_bytes, write_file

DESCRIPTION = """\
Write a folder to begin in: a run spec with comments, a DeepSpeed JSON, and a README.md with the three commands to go on
with, which are printed too. Without an option they train the main job, handwritten digits.
"""
SCHEMA = "run.schema.json"
"""Schema that the first line of every spec names, with which editors complete keys."""
TRAIN = f"ddpm-ds train --spec {SPEC} --deepspeed_config {DS_CONFIG} --run-dir runs/first"
SAMPLE = "ddpm-ds sample runs/first"
NEEDS_PATH = re.compile(r"^( +source: folder) +# needs --set data\.path=FOLDER( .*)?$", re.MULTILINE)
"""Line of a preset that leaves the images' folder to the command line."""
README = """\
# {about}

`ddpm-ds init` wrote this folder. `{spec}` says what is trained (`ddpm-ds schema --markdown` explains every key),
`{ds_config}` how (`ddpm-ds schema ds_config --markdown`).

{data}

Typed in this folder:

{commands}
"""


@dataclass(frozen=True)
class Kind:
    """A kind of training job that ``init`` begins."""

    about: str
    spec: str
    """Name of the preset among :data:`SPECS`."""
    ds_config: str
    """Name of the preset among :data:`DS_CONFIGS`."""
    data: str
    """What has to be in the folder, or installed, before the commands are typed."""
    commands: tuple[str, str, str]
    example: str | None = None
    """Name of the script among the examples that makes data to begin with."""


OWN_PICTURES = f"Put your pictures into `pictures`, or write their folder where `{SPEC}` says `path`."
CAPTIONS = "Captions are in `metadata.jsonl`, or beside each picture in a text file of its name."
KINDS = {
    "digits": Kind(
        "Handwritten digits, in minutes on two CPU cores",
        "digits",
        "zero2_fp16",
        "The digits come with scikit-learn.",
        (TRAIN, SAMPLE, "ddpm-ds diagnose runs/first"),
    ),
    "images": Kind(
        "Pictures of your own, at 64x64 pixels",
        "folder",
        "zero2_bf16",
        OWN_PICTURES,
        (f"ddpm-ds prepare --spec {SPEC}", TRAIN, SAMPLE),
    ),
    "latents": Kind(
        "Pictures of your own, at 256x256 pixels by latents of an autoencoder",
        "latent",
        "zero2_bf16",
        f"{OWN_PICTURES} `pip install 'ddpm_ds[latents]'` first.",
        (f"ddpm-ds prepare --encode --spec {SPEC}", TRAIN, SAMPLE),
    ),
    "text": Kind(
        "Pictures of coloured shapes from captions, in minutes on two CPU cores",
        "tiny_text",
        "zero1_fp32",
        "A script makes pictures, captions and encoders. `pip install 'ddpm_ds[text]'` first.",
        ("python make_text.py", f"ddpm-ds prepare --encode --spec {SPEC}", TRAIN),
        "make_text.py",
    ),
    "sdxl": Kind(
        "SDXL, fine-tuned on captioned pictures of your own",
        "sdxl",
        "zero2_bf16",
        f"{OWN_PICTURES} {CAPTIONS} `pip install 'ddpm_ds[text,latents]'` first.",
        (
            f"ddpm-ds import stabilityai/stable-diffusion-xl-base-1.0 --spec {SPEC} --out imported",
            f"ddpm-ds prepare --encode --spec imported/{SPEC}",
            TRAIN.replace(SPEC, f"imported/{SPEC}"),
        ),
    ),
    "upscaling": Kind(
        "Large pictures from small ones",
        "upscaling",
        "zero0_fp32",
        f"Put pictures of 32x32 pixels or more into `crops`, or write their folder where `{SPEC}` says `path`. The "
        "last 96, by name, are held out.",
        (f"ddpm-ds prepare --spec {SPEC}", TRAIN, f"{SAMPLE} --conditions held-out --members 4 --count 6"),
    ),
    "fields": Kind(
        "Fine fields from coarse ones, in minutes on two CPU cores",
        "downscaling",
        "zero0_fp32",
        f"A script makes temperatures to begin with. For your own write file and arrays where `{SPEC}` says `path` and "
        "`variables`.",
        ("python make_fields.py", TRAIN, f"{SAMPLE} --conditions held-out --members 4 --count 4"),
        "make_fields.py",
    ),
}


def add_init(verbs: Verbs) -> None:
    """Add the verb ``init``."""
    parser = verbs.add_parser(
        "init", help="write a folder to begin in, with a spec, a JSON and commands", description=DESCRIPTION
    )
    kinds = parser.add_mutually_exclusive_group()
    for name, kind in KINDS.items():
        kinds.add_argument(f"--{name}", dest="kind", action="store_const", const=name, help=kind.about)
    parser.add_argument("folder", type=file_path, metavar="FOLDER", help="new or empty folder")
    parser.set_defaults(run=_init, kind="digits")


def _init(options: argparse.Namespace) -> None:
    kind, folder = KINDS[options.kind], options.folder
    files, written = _files(kind), list[Path]()
    made = [each for each in (folder, *folder.absolute().parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OutputError(f"{folder} is not empty; name a new or empty folder")
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
    print(f"{folder}: {', '.join(files)}\n{kind.data}\n\n{_typed([f'cd {shlex.quote(str(folder))}', *kind.commands])}")


def _typed(commands: Iterable[str]) -> str:
    return "\n".join(f"    {command}" for command in commands)


def _files(kind: Kind) -> dict[str, bytes]:
    """Return the files of a folder, by name; raises SpecError if the package is installed without its data."""
    sources = {SPEC: (f"{kind.spec}.yaml", SPECS), DS_CONFIG: (f"{kind.ds_config}.json", DS_CONFIGS)}
    sources[SCHEMA] = (SCHEMA, SPECS)
    if kind.example is not None:
        sources[kind.example] = (kind.example, presets("launch/examples"))
    found = {name: read_bytes(preset(beside / source, beside)) for name, (source, beside) in sources.items()}
    found[SPEC] = NEEDS_PATH.sub(r"\1\n  path: pictures            # your own folder\2", found[SPEC].decode()).encode()
    data = textwrap.fill(kind.data, 120)
    readme = README.format(about=kind.about, spec=SPEC, ds_config=DS_CONFIG, data=data, commands=_typed(kind.commands))
    return found | {"README.md": readme.encode()}

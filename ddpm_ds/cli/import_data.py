"""Verb ``import-data``: the data sets of another trainer as a run spec, and captions where it needs them."""

from __future__ import annotations

import difflib
import json
import math
import os
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpm_ds.cli.init import NEEDS_PATH
from ddpm_ds.cli.options import Verb
from ddpm_ds.config.spec_file import SPECS, load_spec, preset, rewritten
from ddpm_ds.data.spec import ALPHA, BESIDE
from ddpm_ds.ground.errors import OutputError, SpecError
from ddpm_ds.ground.files import MOST_CONFIG_BYTES, read_text, write_file
from ddpm_ds.ground.formats import parse_json
from ddpm_ds.ground.options import option
from ddpm_ds.schema.section import shown

METADATA = "metadata.jsonl"
NUMBERS = {"num_repeats", "repeats", "balancing", "resolution", "caption_dropout_rate", "tag_dropout_probability"}
MOST = 10**6
LATENT = 8
"""Pixels, each way, in a latent of SD's and SDXL's autoencoders."""

Block = dict[str, Any]
"""Values by key, of their file or of our spec."""
Meanings = Mapping[str, str]
"""Meanings of keys that are not carried over; "" is a key that is read, or that changes nothing here."""


def meanings(read: str, about: Mapping[str, str]) -> Meanings:
    """Return the meanings of keys that are ``read``, and of the words in each key of ``about``."""
    return {key: text for words, text in {read: "", **about}.items() for key in words.split()}


RANDOM_FLIP = "enable_random_flip"
ONCE = "changes crop, angle or colours each time; images are prepared once here"
OF_SUBSETS = {"image_dir", "metadata_file", "is_reg", "alpha_mask", "conditioning_data_dir"}
"""Keys of sd-scripts that are read in a subset alone."""
SD_SCRIPTS = meanings(
    "image_dir num_repeats class_tokens caption_extension shuffle_caption caption_separator keep_tokens "
    "keep_tokens_separator caption_prefix caption_tag_dropout_rate caption_dropout_rate resolution enable_bucket "
    "bucket_reso_steps min_bucket_reso max_bucket_reso is_reg metadata_file enable_wildcard cache_info debug_dataset "
    "bucket_no_upscale flip_aug alpha_mask conditioning_data_dir",
    {
        "batch_size": "images on a device; train.batch_images counts those of all devices",
        "validation_split": "share of images that are held out; data.held_out_images is their number",
        "validation_seed": "seed of the held-out images, which are always the same here",
        "color_aug face_crop_aug_range random_crop": ONCE,
        "caption_suffix": "text after each caption",
        "secondary_separator": "separator of tags that stay together",
        "caption_dropout_every_n_epochs": "epochs without captions; data.text.drop is a share of all",
        "token_warmup_min token_warmup_step": "fewer tags at the beginning of training",
        "network_multiplier": "strength of a LoRA",
        "custom_attributes": "attributes that no script here reads",
        "resize_interpolation": "how images are scaled; Lanczos here",
    },
)
ONE_TRAINER = meanings(
    "name path seed enabled type validation_concept balancing repeats balancing_strategy loss_weight image text "
    "include_subdirectories concept_stats",
    {"image_variations text_variations": "variants that are cached; here each time a caption is drawn"},
)
ONE_TRAINER_TEXT = meanings(
    "prompt_source prompt_path enable_tag_shuffling tag_delimiter keep_tags_count tag_dropout_enable tag_dropout_mode "
    "tag_dropout_probability tag_dropout_special_tags_mode caps_randomize_mode caps_randomize_probability "
    "caps_randomize_lowercase",
    {
        "tag_dropout_special_tags tag_dropout_special_tags_regex": "tags that are always or never dropped",
        "caps_randomize_enable": "random capitals",
    },
)
SIMPLE_TUNER = meanings(
    "id type dataset_type instance_data_dir caption_strategy instance_prompt prepend_instance_prompt disabled disable "
    "only_instance_prompt resolution resolution_type repeats caption_shuffle disable_multiline_split crop crop_style "
    "crop_aspect cache_dir_vae vae_cache_clear_each_epoch preserve_data_backend_cache metadata_backend "
    "metadata_update_interval skip_file_discovery text_embeds image_embeds hash_filenames default cache_dir "
    "write_batch_size text_encoder_batch_size",
    {
        "minimum_image_size maximum_image_size minimum_aspect_ratio maximum_aspect_ratio": "leaves images out",
        "target_downsample_size crop_aspect_buckets max_upscale_threshold": "sizes before a crop; see data.buckets",
        "probability": "share of this data set; see repeats in data.sources",
        "conditioning conditioning_data conditioning_type source_dataset_id": "conditions, see data.condition",
        "is_regularisation_data is_regularization_data": "images for a LoRA's regularisation; see loss_weight",
        "parquet": "columns of a table; export them to metadata.jsonl",
        "start_epoch end_epoch start_step end_step": "part of training that has this data set",
    },
)


@dataclass
class Found:
    """Data sets of another trainer in our words."""

    file: Path
    sources: list[Block] = field(default_factory=list)
    shared: Block = field(default_factory=dict)
    """Values that all data sets have here, by key of ``data``; those of the first data set count."""
    captions: dict[Path, dict[str, list[str]]] = field(default_factory=dict)
    """Captions for the ``metadata.jsonl`` of a folder, by name of an image in it."""
    notes: list[str] = field(default_factory=list)

    def check(self, entry: object, keys: Meanings, place: str) -> Block:
        """Return an entry, and note its keys that are not carried over; raises SpecError for unknown or wrong ones."""
        if not isinstance(entry, dict):
            raise SpecError(f"{self.file}: {place} = {shown(entry)} should be a block of keys; write it again")
        for key, value in entry.items():
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1)
                fix = f"did you mean {near[0]}?" if near else "remove it"
                raise SpecError(f"{self.file}: {place}.{key} is unknown; {fix}")
            several = value if key == "resolution" and isinstance(value, list) and len(value) == 2 else [value]
            if key in NUMBERS and not all(isinstance(each, int | float) and 0 <= each <= MOST for each in several):
                raise SpecError(f"{self.file}: {place}.{key} = {shown(value)} should be a number from 0 to {MOST:,}")
            if keys[key] and value not in (None, False, 0, "", [], {}):
                self.notes.append(f"{place}.{key} = {shown(value)} is not carried over: {keys[key]}")
        return entry

    def share(self, place: str, values: Block) -> None:
        """Keep values that one run has once, and note others."""
        for key, value in values.items():
            if self.shared.setdefault(key, value) != value:
                kept = shown(self.shared[key])
                self.notes.append(f"{place} asks for data.{key} = {shown(value)}; all data sets here have {kept}")

    def folder(self, given: object, place: str, *, deep: bool = False) -> Path:
        """Return a folder that exists, and note images below it unless they are meant; raises SpecError."""
        path = Path(str(given or "")).expanduser()
        if not given or not path.is_dir():
            raise SpecError(f"{self.file}: {place} = {shown(given)} is no folder here; give its path")
        if not deep and any(os.sep in name for name in images_in(path).values()):
            self.notes.append(
                f"{place}: images in subfolders of {path} are read too; move them away if they should not"
            )
        return path

    def read_lines(self, folder: Path, extension: str = ".txt", *, first: bool = False) -> None:
        """Keep captions that our folders would read in another way: each line is one, or the ``first`` alone."""
        for stem, name in images_in(folder).items():
            if (beside := folder / f"{stem}{extension}").is_file():
                lines = lines_in(beside)
                if len(lines) > 1 or extension not in (".txt", ".caption"):
                    self.captions.setdefault(folder, {})[name] = (lines[:1] if first else lines) or [""]


def lines_in(file: Path) -> list[str]:
    """Return the lines of a text file that are not empty."""
    return [line.strip() for line in read_text(file).splitlines() if line.strip()]


def images_in(folder: Path) -> dict[str, str]:
    """Return the images in a folder and its subfolders, without OneTrainer's masks: name by name without extension."""
    from ddpm_ds.data.sources.base import is_image
    from ddpm_ds.data.sources.files import MASK

    paths = (
        os.path.join(above, name)
        for above, _, names in os.walk(folder)
        for name in sorted(names)
        if is_image(name) and MASK.search(name) is None
    )
    return {os.path.splitext(name)[0]: name for name in (os.path.relpath(path, folder) for path in paths)}


def tags_of(**keys: object) -> Block:
    """Return the keys of ``data.text`` for tags that change, if any do."""
    given = {key: value for key, value in keys.items() if value}
    changes = given.keys() & {"shuffle", "drop", "prefix"}
    return {"text.tags": given, "text.stored": "text"} if changes else {"text.tags": None}


def from_sd_scripts(content: Block, found: Found) -> None:
    """Read a data set configuration: keys of a subset, else of its data set, else of all."""
    found.check(content, meanings("general datasets", {}), "file")
    of_all = {key: text for key, text in SD_SCRIPTS.items() if key not in OF_SUBSETS}
    general = found.check(content.get("general", {}), of_all, "general")
    images, regular = 0.0, list[tuple[Block, float]]()
    for at, dataset in enumerate(content.get("datasets", [])):
        of_set = found.check({**dataset, "subsets": []}, {**of_all, "subsets": ""}, f"datasets.{at}")
        for number, subset in enumerate(dataset.get("subsets", [])):
            place = f"datasets.{at}.subsets.{number}"
            get = {**general, **of_set, **found.check(subset, SD_SCRIPTS, place)}.get
            folder, mark = found.folder(get("image_dir"), f"{place}.image_dir"), get("caption_separator", ",")
            if get("metadata_file"):
                found.captions[folder] = metadata_of(Path(str(get("metadata_file"))), folder, mark)
                if others := {*images_in(folder).values()} - found.captions[folder].keys():
                    found.notes.append(
                        f"{place}.metadata_file lacks {len(others):,} images of {folder}, such as {min(others)}; they "
                        "are read too, so move them away"
                    )
            else:
                extension = get("caption_extension", ".caption")
                found.read_lines(folder, extension, first=not get("enable_wildcard"))
            source = {"path": str(folder), "repeats": get("num_repeats", 1), "caption": get("class_tokens", "")}
            found.sources.append(source)
            if (given := get("conditioning_data_dir")) or get("alpha_mask"):
                place_of = f"{place}.conditioning_data_dir"
                source["mask"] = str(found.folder(given, place_of)) if given else ALPHA
                found.notes.append(
                    f"{place}: {source['mask']} weighs the loss, as masked_loss does; else remove this mask"
                )
            if get("is_reg"):
                regular.append((source, len(images_in(folder)) * source["repeats"]))
            else:
                images += len(images_in(folder)) * source["repeats"]
            size, buckets = get("resolution", 1024), None
            if get("enable_bucket"):
                buckets = {"step": get("bucket_reso_steps", 64), "sizes": "sd_scripts"}
                buckets |= {"minimum": get("min_bucket_reso", 256), "maximum": get("max_bucket_reso", 1024)}
                buckets |= {"no_upscale": True} if get("bucket_no_upscale") else {}
            found.share(
                place, {"image_size": [size, size] if isinstance(size, int) else size[::-1], "buckets": buckets}
            )
            found.share(place, {"text.drop": float(get("caption_dropout_rate", 0.0))})
            found.share(place, {"horizontal_flips": bool(get("flip_aug"))})
            kept = {"keep": get("keep_tokens"), "keep_separator": get("keep_tokens_separator")}
            changes = {"shuffle": get("shuffle_caption"), "drop": get("caption_tag_dropout_rate")}
            found.share(place, tags_of(separator=mark, **kept, **changes, prefix=get("caption_prefix")))
    for source, count in regular:  # sd-scripts repeats them until they are as many as the others
        source["repeats"] *= max(1e-4, round(images / max(1, sum(each for _, each in regular)), 4)) if count else 1
        found.notes.append(f"{source['path']} has is_reg: such images come as often as all others; loss_weight is 1")


def metadata_of(file: Path, folder: Path, mark: str) -> dict[str, list[str]]:
    """Return the captions in a metadata file of sd-scripts, with tags after a ``mark``, by name of an image."""
    text, names, captions = read_text(file), images_in(folder), dict[str, list[str]]()
    if file.suffix == ".jsonl":
        entries = {line["image_path"]: line for line in map(parse_json, filter(str.strip, text.splitlines()))}
    else:
        entries = parse_json(text)
    for key, entry in entries.items():
        name = os.path.relpath(key, folder) if os.path.exists(key) else names.get(key, key)
        if name.startswith(".."):
            raise SpecError(f"{file}: {key} is not in image_dir = {folder}; give the folder that has all images")
        captions[name] = [f"{mark} ".join(filter(None, (entry.get("caption"), entry.get("tags"))))]
    return captions


def from_one_trainer(content: Iterable[object], found: Found) -> None:
    """Read a list of concepts."""
    for number, given in enumerate(content):
        place = f"concepts.{number}"
        get = (block := found.check(given, ONE_TRAINER, place)).get
        text = found.check(get("text", {}), ONE_TRAINER_TEXT, f"{place}.text").get
        changes = {key: ONCE for key in get("image", {}) if key.startswith("enable_") and key != RANDOM_FLIP}
        image = found.check(get("image", {}), dict.fromkeys(get("image", {}), "") | changes, f"{place}.image")
        kind = "VALIDATION" if get("validation_concept") else get("type", "STANDARD")
        if not get("enabled", True):
            continue
        if kind not in ("STANDARD", "VALIDATION"):
            raise SpecError(f"{found.file}: {place}.type = {kind} teaches predictions of the base model; remove it")
        folder = found.folder(get("path"), f"{place}.path", deep=bool(get("include_subdirectories")))
        names, prompt = images_in(folder), text("prompt_source", "sample")
        if prompt == "filename":
            found.captions[folder] = {name: [os.path.basename(stem)] for stem, name in names.items()}
        elif prompt == "concept":
            found.captions[folder] = dict.fromkeys(names.values(), lines_in(Path(text("prompt_path", ""))) or [""])
        else:
            found.read_lines(folder)
        if kind == "VALIDATION":
            found.share(place, {"held_out_path": str(folder)})
            continue
        found.share(place, {"horizontal_flips": bool(image.get(RANDOM_FLIP))})
        if any(folder.rglob("*-masklabel.*")):
            found.share(place, {"mask": BESIDE})
            found.notes.append(f"{place}: {BESIDE} weighs the loss, as masked_training does; else remove data.mask")
        among = max(1, len(names)) if get("balancing_strategy") == "SAMPLES" else 1
        repeats = round(get("balancing" if "balancing" in block else "repeats", 1.0) / among, 6)
        found.sources.append({"path": str(folder), "repeats": repeats, "loss_weight": get("loss_weight", 1.0)})
        drop, mode = text("tag_dropout_probability", 0.0), text("tag_dropout_mode", "FULL")
        if text("tag_dropout_enable") and mode != "RANDOM":
            found.notes.append(
                f"{place}.text.tag_dropout_mode = {mode} is not carried over: tags are dropped one by one"
            )
        drop = drop if text("tag_dropout_enable") and mode == "RANDOM" else 0.0
        kept = {"separator": text("tag_delimiter", ","), "keep": text("keep_tags_count", 1)}
        found.share(place, {"text.missing": "empty"} | tags_of(**kept, shuffle=text("enable_tag_shuffling"), drop=drop))


def from_simple_tuner(content: Iterable[object], found: Found) -> None:
    """Read a list of data backends; those of caches are left out."""
    for number, given in enumerate(content):
        place = f"backends.{number}"
        if isinstance(given, dict) and given.get("dataset_type", "image") in ("text_embeds", "image_embeds"):
            continue
        get = found.check(given, SIMPLE_TUNER, place).get
        if get("disabled") or get("disable"):
            continue
        for key, only in (("dataset_type", "image"), ("type", "local")):
            if get(key, only) != only:
                raise SpecError(f"{found.file}: {place}.{key} = {shown(get(key))} can't be read; {only} can")
        folder = found.folder(get("instance_data_dir"), f"{place}.instance_data_dir", deep=True)
        how, prompt, names = get("caption_strategy", "filename"), get("instance_prompt") or "", images_in(folder)
        if how == "instanceprompt" or get("only_instance_prompt"):
            found.captions[folder] = {name: [prompt] for name in names.values()}
        elif how == "filename":
            found.captions[folder] = {name: [os.path.basename(stem).replace("_", " ")] for stem, name in names.items()}
        elif how != "textfile":
            raise SpecError(f"{found.file}: {place}.caption_strategy = {how} can't be read; write {METADATA} of it")
        elif not get("disable_multiline_split"):
            found.read_lines(folder)
        found.sources.append({"path": str(folder), "repeats": get("repeats", 0) + 1})  # 0 is once
        shuffle, size = get("caption_shuffle") or {}, get("resolution", 1024)
        mark = {"space": " ", "period": "."}.get(shuffle.get("split_on", "comma"), ",")
        tags = {"separator": mark, "keep": shuffle.get("position_start"), "shuffle": shuffle.get("enable")}
        pixels = 1000 * math.sqrt(size) if get("resolution_type") == "area" else size
        side, square = round(pixels / LATENT) * LATENT, get("crop") and get("crop_aspect", "square") == "square"
        found.share(place, {"image_size": [side, side], "buckets": None if square else {"sizes": "nearest"}})
        found.share(place, tags_of(**tags, prefix=prompt if get("prepend_instance_prompt") else ""))


def read(file: Path) -> Found:
    """Read a file of another trainer, known by its content; raises SpecError."""
    found = Found(file)
    try:
        text = read_text(file, MOST_CONFIG_BYTES)
        content = tomllib.loads(text) if file.suffix.lower() == ".toml" else parse_json(text)
        if isinstance(content, dict) and "concepts" in content:
            content = content["concepts"]
        if isinstance(content, dict):
            from_sd_scripts(content, found)
        elif any("path" in each for each in content):
            from_one_trainer(content, found)
        else:
            from_simple_tuner(content, found)
    except OSError as error:
        raise SpecError(f"{file}: {error.filename} can't be read ({error.strerror}); mend it") from None
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise SpecError(
            f"{file}: it is no configuration of data sets ({error}); give sd-scripts' TOML, OneTrainer's "
            "concepts or SimpleTuner's backends"
        ) from None
    if not found.sources:
        raise SpecError(f"{file}: it has no data set to train on; give one with images")
    return found


def spec_with(found: Found, base: Path) -> str:
    """Return the text of a ``base`` spec with the data sets found, after their notes; raises SpecError."""
    of_latents = load_spec(base, reads_data=False).data.autoencoder is not None
    keys: Block = {"source": "folder", "path": None, "sources": found.sources, "text.captions": "text"}
    for key, value in found.shared.items():
        if key == "image_size" and of_latents:
            value = [side // LATENT for side in value]
        inside = value if isinstance(value, dict) else {}
        keys |= {key: None if inside else value, **{f"{key}.{name}": each for name, each in inside.items()}}
    try:
        changes = [f"data.{key}={json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()]
        text = NEEDS_PATH.sub(r"\1", rewritten(base, load_spec(base, unasked=changes)))
    except SpecError as error:
        raise SpecError(*(fault.replace(f"{base}: ", f"{found.file}: ", 1) for fault in error.args)) from None
    notes = "".join(f"# {line}\n" for note in found.notes for line in textwrap.wrap(note, 116, subsequent_indent="  "))
    return f"# Data sets of {found.file.name}, by ddpm-ds import-data.\n{notes}{text}"


@dataclass(frozen=True)
class ImportDataOptions:
    file: Path = option(
        "sd-scripts' TOML, OneTrainer's concepts.json or SimpleTuner's multidatabackend.json", "FILE", names=("file",)
    )
    out: Path = option("spec to write, a new file", "OUT", required=True)
    spec: Path = option("spec whose other sections are taken (default sdxl)", "BASE", default=Path("sdxl"))


@Verb
def import_data(options: ImportDataOptions) -> None:
    """Take the data sets of another trainer.

    Reads the data sets of sd-scripts (kohya), OneTrainer or SimpleTuner, and writes a run spec with them, which begins
    with notes on keys that are not carried over. Captions that our folders can't give, such as several lines in a text
    file, are written to metadata.jsonl in the folder of images.

      ddpm-ds import-data dataset.toml --out mine.yaml
      ddpm-ds import-data concepts.json --spec launch/specs/sd15.yaml --out mine.yaml
    """
    found, base, out = read(options.file), preset(options.spec, SPECS), options.out
    files = {
        folder / METADATA: "".join(
            json.dumps({"file_name": name, "text": texts if texts[1:] else texts[0]}, ensure_ascii=False) + "\n"
            for name, texts in captions.items()
        )
        for folder, captions in found.captions.items()
    }
    spec = spec_with(found, base)
    try:
        for path, content in {**files, out: None}.items():
            if path.exists() and (content is None or read_text(path) != content):
                raise OutputError(f"{path} exists, and is not replaced; move it away")
        for path, content in {out: spec, **files}.items():
            write_file(path, content.encode())
    except OSError as error:
        raise OutputError(f"{error.filename} can't be written ({error.strerror}); choose another place") from None
    kept = [f"{path}: captions of {len(found.captions[path.parent]):,} images" for path in files]
    print(*found.notes, *kept, f"{out}: {base} with {len(found.sources)} data sets of {options.file}", sep="\n")
    print(
        f"prepare and train it with\n  ddpm-ds prepare --encode --spec {out}\n  ddpm-ds train --spec {out} "
        "--deepspeed_config ds_configs/zero2_bf16.json"
    )

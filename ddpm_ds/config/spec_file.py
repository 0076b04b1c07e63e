"""Reading run specs from YAML and ``--set`` into a checked ``RunSpec``; JSON schema and Markdown of the run spec."""

import copy
import difflib
import functools
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.ground.errors import MOST_FAULTS, SpecError
from ddpm_ds.ground.files import MOST_CONFIG_BYTES, expanded, read_text
from ddpm_ds.ground.formats import DEEPEST, check_digits
from ddpm_ds.schema.choices import SOURCES
from ddpm_ds.schema.section import Format, shown
from ddpm_ds.schema.types import GivenPath


def presets(folder: str) -> Path:
    """Return a folder of presets, such as ``launch/specs``, of the clone, or its copy in an installed package."""
    package = Path(str(resources.files("ddpm_ds"))).resolve()
    clone = package.parent / folder
    return clone if clone.is_dir() else package / "presets" / Path(folder).name


def preset(path: Path | str, folder: Path) -> Path:
    """Return a path that a user gave or, if there is no such file, the preset in ``folder`` that it means.

    ``digits``, ``digits.yaml`` and ``launch/specs/digits.yaml`` mean the preset, wherever the program is started.
    Raises SpecError if the package was installed without its presets.
    """
    given = expanded(path)
    if os.path.exists(given) or given.parent.name not in ("", folder.name):
        return given
    if not folder.is_dir():
        raise SpecError(f"{folder} is missing: ddpm_ds was installed without its data; reinstall it from a whole wheel")
    return next((found for found in folder.glob("*.*") if given.name in (found.name, found.stem)), given)


JSON_PREFIX = "ds."  # prefix of overrides that change the DeepSpeed JSON instead of the spec
MOST_NODES = 10_000  # maximum number of values in a YAML text


class _Loader(yaml.SafeLoader):
    """Loader of YAML within limits. A duplicate key is an error, 1e-4 a number, and a date text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth, self._nodes = 0, 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read a node within limits, and refuse tags and aliases: an alias may repeat much."""
        event = self.peek_event()
        if self._depth == DEEPEST:
            raise _fault(f"lists or blocks are more than {DEEPEST} levels deep", event)
        if getattr(event, "tag", None) is not None:
            raise _fault(f"the tag {event.tag} is not read; write the value alone", event)
        if isinstance(event, yaml.AliasEvent):
            raise _fault(f"the alias *{event.anchor} is not read; write the value itself", event)
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise _fault(f"there are more than {MOST_NODES:,} values", event)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """Return a node's value; raises MarkedYAMLError for a number with too many digits or no digit."""
        try:
            if node.tag in _NUMBERS:
                check_digits(node.value)
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.MarkedYAMLError(None, None, str(error), node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        keys: set[str] = set()
        for name, _ in node.value:
            key = self.construct_object(name, deep=True)
            if not isinstance(key, str):
                raise _fault(f"the key {shown(key)} is no text; a key is a name", name)
            if key in keys:
                raise _fault(f"{key} is given twice", node)
            keys.add(key)
        return super().construct_mapping(node, deep)


_SYNONYMS = {
    "train.images (steps x train.batch_images)": "steps max_steps",
    "train.images (iterations x train.batch_images)": "iterations",
    "train.images (epochs x images of the data)": "epochs",
    "train.batch_images": "batch_size",
    "train.accumulation": "gradient_accumulation_steps",
    "optimizer.learning_rate": "lr",
    "optimizer.epsilon": "eps",
    "optimizer.weight_decay": "wd",
    "optimizer.warmup_images (steps x train.batch_images)": "warmup_steps",
    "ema.halflife_images (train.batch_images x log(0.5) / log(decay))": "ema.decay ema_decay",
    "data.image_size": "resolution size",
    "data.channels": "in_channels",
    "data.workers": "num_workers",
    "data.source": "dataset",
    "unet": "model",
    "unet.channels": "dim model_channels",
    "unet.multipliers": "dim_mults channel_mult",
    "unet.blocks_per_level": "num_res_blocks",
    "unet.classes": "num_classes",
    "diffusion.schedule": "beta_schedule",
    "diffusion.timesteps": "num_train_timesteps",
    "diffusion.objective": "prediction_type",
    "sampler.steps": "num_inference_steps",
    "sampler.guidance": "guidance_scale",
}
SYNONYMS = {name: key for key, names in _SYNONYMS.items() for name in names.split()}
"""Names that people type, in any section, for a key, which may be followed by its unit."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def _fault(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, at.start_mark)


# PyYAML follows YAML 1.1, in which an exponent needs a dot and a sign: 1e-4 would be text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def spec_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the spec, without those of the DeepSpeed JSON, for :func:`load_spec`."""
    return [item for item in overrides if not item.startswith(JSON_PREFIX)]


def read_values(path: Path) -> dict[str, Any]:
    """Return the unchecked values of a YAML run spec; raises SpecError."""
    try:
        values = parse_yaml(read_text(path, MOST_CONFIG_BYTES), str(path))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.yaml")], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "examples are in launch/specs"
        raise SpecError(f"{path}: no such run spec; {hint}") from None
    except OSError as error:
        raise SpecError(f"{path}: can't be read as a run spec ({error.strerror}); give a YAML file") from None
    if not isinstance(values, dict):
        raise SpecError(f"{path}: holds {shown(values)} instead of sections (data, unet, ...); see launch/specs")
    return values


def load_spec(
    path: GivenPath, overrides: Sequence[str] = (), unasked: Sequence[str] = (), *, reads_data: bool = True
) -> RunSpec:
    """Read a YAML run spec and apply ``section.key=value`` overrides. ``unasked`` ones apply last, and no message names
    them. Without ``reads_data`` the data need no path. Raises SpecError with a line for each fault; whether values fit
    each other is checked once each of them is right.
    """
    path = preset(path, SPECS)
    values = read_values(path)
    origins: dict[str, str] = {}
    faults: list[str] = []
    for item in overrides:
        try:
            origins[_override(values, item)] = f"--set {item}"
        except SpecError as error:
            faults += error.args
    for item in unasked:
        _override(values, item)
    data = values.get("data")
    if not reads_data and isinstance(data, dict) and not any(data.get(key) for key in ("path", "name", "sources")):
        data["path"] = getattr(SOURCES.get(str(data.get("source"))), "path", None)
    try:
        spec = SPEC.read(values)
    except ValidationError as error:
        everything, refused = " ".join([str(path), *origins.values()]), bool(faults)
        for location, messages in SPEC.faults(error, values).items():
            if location or not refused:
                origin = origins.get(".".join(location), str(path)) if location else everything
                faults += [f"{origin}: {message}" for message in messages.splitlines()]
    if faults:
        raise SpecError(*faults[:MOST_FAULTS])
    return spec


_parsed = functools.lru_cache(maxsize=64)(functools.partial(yaml.load, Loader=_Loader))
"""Parser of a text with a cache, since a sweep reads one spec for each of its runs."""


def parse_yaml(text: str, origin: str) -> Any:
    """Return the value of a YAML text within limits; raises :class:`SpecError` that begins with ``origin``."""
    try:
        return copy.deepcopy(_parsed(text))
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SpecError(f"{origin}: not YAML{line}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise SpecError(f"{origin}: not YAML: {' '.join(str(error).split())}") from None


def rewritten(path: Path, spec: RunSpec) -> str:
    """Return the YAML of a run spec file, with its comments and order, changed where it differs from ``spec``."""
    text, whole = read_text(preset(path, SPECS), MOST_CONFIG_BYTES), spec.model_dump(mode="json")
    for sparse in (True, False):  # a default may depend on other keys
        changed = _rewritten(text, whole, spec.model_dump(mode="json", exclude_defaults=sparse))
        if SPEC.read(parse_yaml(changed, str(path))) == spec:
            break
    return changed


def _rewritten(text: str, whole: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return a YAML text with the values of ``whole`` for its keys, and those of ``new`` for keys that it lacks."""
    edits: list[tuple[int, int, str]] = []

    def end(node: yaml.Node) -> int:
        """Return the place after a node, without the comments behind a block."""
        if node.value and isinstance(node, yaml.CollectionNode) and not node.flow_style:
            last = node.value[-1]
            return end(last[1] if isinstance(last, tuple) else last)
        return len(text[: node.end_mark.index].rstrip())

    def edit(node: yaml.MappingNode, values: Any, whole: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        for key, value in node.value:
            wanted, name = whole.get(key.value), key.value
            if isinstance(value, yaml.MappingNode) and not value.flow_style and isinstance(wanted, dict):
                edit(value, values[name], wanted, new.get(name, {}))
            elif values[name] != wanted:
                first, last = key.end_mark.index, end(value)
                written = yaml.safe_dump(wanted, default_flow_style=True, width=math.inf, allow_unicode=True)
                written = written.removesuffix("...\n").rstrip()
                edits.append((first, last, f": {written}".ljust(last - first)))
        if more := {name: value for name, value in new.items() if name not in values}:
            block = textwrap.indent(
                yaml.safe_dump(more, sort_keys=False, allow_unicode=True), " " * node.start_mark.column
            )
            edits.append((at := (text + "\n").index("\n", end(node)), at, f"\n{block.rstrip()}"))

    root = yaml.compose(text, Loader=_Loader)
    assert isinstance(root, yaml.MappingNode), "it has been read"
    edit(root, parse_yaml(text, ""), whole, new)
    for first, last, written in sorted(edits, reverse=True):
        text = text[:first] + written + text[last:]
    return re.sub(" +$", "", text, flags=re.MULTILINE)


def _override(values: dict[str, Any], item: str) -> str:
    """Set one ``section.key=value`` in the values and return its dotted key."""
    key, equals, text = item.partition("=")
    key = key.strip()
    if not (equals and key):
        raise SpecError(f"--set {item}: write section.key=value, such as unet.dropout=0.1")
    if key.startswith(JSON_PREFIX):
        raise SpecError(f"--set {item}: this command reads no DeepSpeed JSON; leave it out")
    *sections, name = location = key.split(".")
    value = parse_yaml(text, f"--set {item}")
    if (section := SPEC.at(location)) is not None and not (value is None and SPEC.field_at(key).default is None):
        first = f"{key}.{next(iter(section.model_fields))}"
        raise SpecError(f"--set {item}: {key} is a section; set one of its keys, such as {first}")
    place = values
    for depth, inside in enumerate(sections, start=1):
        if SPEC.at(sections[:depth]) is None:
            raise SpecError(f"--set {item}: {SPEC.unknown_at(sections[:depth], None, values)}")
        if place.setdefault(inside, {}) is None and SPEC.field_at(".".join(sections[:depth])).default is None:
            place[inside] = {}
        place = place[inside]
        if not isinstance(place, dict):
            raise SpecError(f"--set {item}: {'.'.join(sections[:depth])} is {shown(place)} in the file, not a section")
    place[name] = value
    return key


SPEC = Format(RunSpec, SYNONYMS)  # the run spec as a kind of file
SPECS = presets("launch/specs")  # folder of the run specs that come with this package
DEFAULT_SPEC = SPECS / "digits.yaml"  # default run spec

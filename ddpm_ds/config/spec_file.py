"""Reading run specs from YAML and ``--set`` into a checked ``RunSpec``; JSON schema and Markdown of the run spec."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ddpm_ds.command_line import limit
from ddpm_ds.config.spec import GivenPath, RunSpec, Section, with_current_names
from ddpm_ds.errors import MOST_FAULTS, SpecError
from ddpm_ds.files import DEEPEST, MOST_CONFIG_BYTES, check_digits, preset, presets, read_text

JSON_PREFIX = "ds."
"""Prefix of overrides that change the DeepSpeed JSON instead of the spec."""


MOST_NODES = 10_000
"""Maximum number of values in a YAML text, including repetitions by aliases."""
MOST_EXACT = 2**53
"""Largest number up to which floats represent every whole number."""


class _Loader(yaml.SafeLoader):
    """Loader of YAML within limits, to which a duplicate key is an error, 1e-4 a number, 1e6 a whole number and a date
    text.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth, self._nodes = 0, 0
        self._sizes: dict[str, int] = {}
        """Values inside of each anchor; an anchor that is still being read has none yet."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read a node within the limits, which stop nested aliases and deep nesting.

        Tags such as !!bool or !!binary are refused: the form of a value decides its type.
        """
        event, before = self.peek_event(), self._nodes
        if self._depth == DEEPEST:
            raise _fault(f"lists or blocks are more than {DEEPEST} levels deep", event)
        if getattr(event, "tag", None) is not None:
            raise _fault(f"the tag {event.tag} is not read; write the value alone", event)
        if isinstance(event, yaml.AliasEvent) and event.anchor in self.anchors and event.anchor not in self._sizes:
            raise _fault(f"{event.anchor} holds itself", event)
        self._nodes += self._sizes.get(str(event.anchor), 1) if isinstance(event, yaml.AliasEvent) else 1
        if self._nodes > MOST_NODES:
            raise _fault(f"there are more than {MOST_NODES:,} values", event)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None and not isinstance(event, yaml.AliasEvent):
            self._sizes[event.anchor] = self._nodes - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return a node's value.

        Raises:
            MarkedYAMLError: it is a number with too many digits, or looks like a number but is none.
        """
        try:
            if node.tag in _NUMBERS:
                check_digits(node.value)
            value = super().construct_object(node, deep)
            exact = isinstance(value, float) and value.is_integer() and abs(value) <= MOST_EXACT
            return int(value) if exact else value  # fields of numbers take both
        except ValueError as error:
            raise yaml.MarkedYAMLError(None, None, str(error), node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for name, _ in node.value:
            if name.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(name, deep=True)
            if not isinstance(key, str):
                raise _fault(f"the key {shown(key)} is no text; a key is a name", name)
            if key in keys:
                raise _fault(f"{key} is given twice", node)
            keys.add(key)
        return super().construct_mapping(node, deep)


SYNONYMS = {
    "steps": "train.images (steps x train.batch_images)",
    "max_steps": "train.images (steps x train.batch_images)",
    "iterations": "train.images (iterations x train.batch_images)",
    "epochs": "train.images (epochs x images of the data)",
    "batch_size": "train.batch_images",
    "gradient_accumulation_steps": "train.accumulation",
    "lr": "optimizer.learning_rate",
    "eps": "optimizer.epsilon",
    "wd": "optimizer.weight_decay",
    "warmup_steps": "optimizer.warmup_images (steps x train.batch_images)",
    "ema.decay": "ema.halflife_images (train.batch_images x log(0.5) / log(decay))",
    "ema_decay": "ema.halflife_images (train.batch_images x log(0.5) / log(decay))",
    "resolution": "data.image_size",
    "size": "data.image_size",
    "in_channels": "data.channels",
    "num_workers": "data.workers",
    "dataset": "data.source",
    "model": "unet",
    "dim": "unet.channels",
    "model_channels": "unet.channels",
    "dim_mults": "unet.multipliers",
    "channel_mult": "unet.multipliers",
    "num_res_blocks": "unet.blocks_per_level",
    "num_classes": "unet.classes",
    "beta_schedule": "diffusion.schedule",
    "num_train_timesteps": "diffusion.timesteps",
    "prediction_type": "diffusion.objective",
    "num_inference_steps": "sampler.steps",
    "guidance_scale": "sampler.guidance",
}
"""Names that people type, in any section, for a key, which may be followed by its unit."""


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def _fault(problem: str, at: Any) -> yaml.MarkedYAMLError:
    """Return the error for a node or event."""
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


def load_spec(path: GivenPath, overrides: Sequence[str] = ()) -> RunSpec:
    """Read a YAML run spec and apply ``section.key=value`` overrides, whose values are also YAML.

    Raises :class:`SpecError`, one line for each fault, if the file can't be read or a key or value is wrong. Whether
    values fit each other is only checked once each of them is right.
    """
    path = preset(path, SPECS)
    values = _read(path)
    origins: dict[str, str] = {}
    faults: list[str] = []
    for item in overrides:
        try:
            origins[_override(values, item)] = f"--set {item}"
        except SpecError as error:
            faults += error.args
    values = with_current_names(values)
    try:
        # Strict by JSON's rules: a list may be a tuple and text a path, but "64" is no number and true is not 1.
        spec = RunSpec.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        everything, refused = " ".join([str(path), *origins.values()]), bool(faults)
        for key, message in _problems(error, values):
            if key or not refused:
                faults.append(f"{origins.get(key, str(path) if key else everything)}: {message}")
    if faults:
        raise SpecError(*faults[:MOST_FAULTS])
    return spec


def section_error(name: str, error: ValidationError, values: Mapping[str, Any]) -> SpecError:
    """Return the error for the ``values`` of a section of the spec that was made by itself, in Python."""
    return SpecError(*(message for _, message in _problems(error, {name: values}, (name,))))


def spec_schema() -> dict[str, Any]:
    """Return the JSON schema of the run spec, for editors that complete and check YAML."""
    schema = RunSpec.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for part in (section, *section["properties"].values()):
            if "description" in part:  # join a docstring's lines
                part["description"] = " ".join(part["description"].split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def spec_markdown() -> str:
    """Return every section, field, type, default and docstring as Markdown."""
    schema = spec_schema()
    lines: list[str] = []
    fields = schema["properties"].items()
    sections = {name: schema["$defs"][field["$ref"].rpartition("/")[2]] for name, field in fields if "$ref" in field}
    for name, section in {"": schema, **sections}.items():
        lines += [f"## `{name}`" if name else "## Top level", "", section["description"], ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key, field in section["properties"].items():
            if "$ref" in field:
                kind, default = f"section [`{key}`](#{key})", "" if key in section["required"] else "all defaults"
            else:
                kind = expected(field)
                default = "**required**" if key in section.get("required", ()) else f"`{json.dumps(field['default'])}`"
            lines.append(f"| `{key}` | {kind} | {default} | {field.get('description', '')} |".replace("  ", " "))
        lines.append("")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, MOST_CONFIG_BYTES)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.yaml")], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "examples are in launch/specs"
        raise SpecError(f"{path}: no such run spec; {hint}") from None
    except OSError as error:
        raise SpecError(f"{path}: can't be read as a run spec ({error.strerror}); give a YAML file") from None
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise SpecError(f"{path}: holds {shown(values)} instead of sections (data, unet, ...); see launch/specs")
    return values


def parse_yaml(text: str, origin: str) -> Any:
    """Return the value of a YAML text within limits; raises :class:`SpecError` that begins with ``origin``."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SpecError(f"{origin}: not YAML{line}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise SpecError(f"{origin}: not YAML: {' '.join(str(error).split())}") from None


def _override(values: dict[str, Any], item: str) -> str:
    """Set one ``section.key=value`` in the values and return its dotted key."""
    key, equals, text = item.partition("=")
    key = key.strip()
    if not (equals and key):
        raise SpecError(f"--set {item}: write section.key=value, such as unet.dropout=0.1")
    if key.startswith(JSON_PREFIX):
        raise SpecError(f"--set {item}: this command reads no DeepSpeed JSON; leave it out")
    *sections, name = location = key.split(".")
    if _section_at(location):
        raise SpecError(f"--set {item}: {key} is a section; set one of its keys, such as {key}.{_fields(location)[0]}")
    place = values
    for depth, section in enumerate(sections, start=1):
        if not _section_at(sections[:depth]):
            raise SpecError(f"--set {item}: {_unknown(sections[:depth], _meant(sections[:depth]))}")
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise SpecError(f"--set {item}: {'.'.join(sections[:depth])} is {shown(place)} in the file, not a section")
    place[name] = parse_yaml(text, f"--set {item}")
    return key


def _problems(error: ValidationError, values: Mapping[str, Any], within: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Return the dotted key and the message of each problem, without missing keys that were only misspelt.

    ``within`` is the section in which the error was found, () for the whole spec.
    """
    found: dict[str, str] = {}
    meant: set[str] = set()
    for problem in sorted(error.errors(), key=lambda problem: problem["type"] == "missing")[:MOST_FAULTS]:
        location = _field_location((*within, *problem["loc"]))
        key = ".".join(location)
        match problem["type"]:
            case "value_error":  # from RunSpec's own checks, already one line each
                return [("", fault) for fault in problem["ctx"]["error"].args]
            case "extra_forbidden":
                near = _meant(location)
                meant.add(near.partition(" ")[0])
                found[key] = _unknown(location, near)
            case "json_invalid":  # the one fault that a JSON text of our own can have
                found[key] = "a text has half of a surrogate pair, such as \\udcff; write the character itself"
            case "path":
                found[key] = f"{key} = {shown(_at(values, location))} can't be a path: {problem['msg']}"
            case "missing" if location == (*within, *problem["loc"]):
                if key not in meant:
                    found[key] = f"{key} is missing; it takes {_expected_at(location)}"
            case _:
                found[key] = f"{key} = {shown(_at(values, location))} should be {_expected_at(location)}"
    return list(found.items())


def _at(values: Any, location: Sequence[str]) -> Any:
    for name in location:
        values = values[name]
    return values


def _field_location(location: Sequence[int | str]) -> tuple[str, ...]:
    """Return the part of pydantic's location that names a field, without list items and union members."""
    names = tuple(map(str, location))
    return next((names[:depth] for depth in range(1, len(names)) if not _section_at(names[:depth])), names)


def _section_at(location: Sequence[str]) -> type[Section] | None:
    model: Any = RunSpec
    for name in location:
        field = model.model_fields.get(name)
        model = field.annotation if field else None
        if not (isinstance(model, type) and issubclass(model, Section)):
            return None
    return model


def _fields(location: Sequence[str]) -> list[str]:
    section = _section_at(location)
    return list(section.model_fields) if section else []


def _meant(location: Sequence[str]) -> str:
    """Return the key that an unknown one may mean, perhaps with a unit; "" if there is none."""
    *sections, name = location
    known = _fields(sections)
    if (synonym := SYNONYMS.get(".".join(location)) or SYNONYMS.get(name)) and name not in known:
        return synonym
    if near := difflib.get_close_matches(name, known, n=1):
        return ".".join([*sections, near[0]])
    elsewhere = [f"{other}.{name}" for other in _fields(()) if name in _fields((other,))]
    return " or ".join(elsewhere) if len(elsewhere) < 3 else ""


def _unknown(location: Sequence[str], meant: str) -> str:
    *sections, name = location
    key, known = ".".join(location), _fields(sections)
    if name in known:
        return f"{key} is a value, not a section; set it alone"
    return f"{key} is unknown{f'; did you mean {meant}?' if meant else '; known here: ' + ', '.join(known)}"


def shown(value: Any) -> str:
    """Return a value as JSON, or its type if JSON has nothing like it, shortened to fit a line."""
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError):  # a list that holds itself, or thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _expected_at(location: Sequence[str]) -> str:
    if _section_at(location):
        return f"a section with {', '.join(_fields(location))}"
    *sections, name = location
    section = _section_at(sections)
    assert section is not None
    return expected(section.model_json_schema()["properties"][name])


def expected(schema: Mapping[str, Any]) -> str:
    """Describe a field's JSON schema in words."""
    if "$ref" in schema:
        return f"a {schema['$ref'].rpartition('/')[2]}"
    if "anyOf" in schema:
        return " or ".join(expected(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " or ".join(json.dumps(choice) for choice in schema.get("enum", [schema.get("const")]))
    match schema["type"]:
        case "integer" | "number" as kind:
            signs = (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))
            number = "a whole number" if kind == "integer" else "a number"
            if "minimum" in schema and "maximum" in schema:
                return f"{number} from {limit(schema['minimum'])} to {limit(schema['maximum'])}"
            limits = [f"{sign} {limit(schema[name])}" for name, sign in signs if name in schema]
            return " ".join([number, " and ".join(limits)]).strip()
        case "array" if "prefixItems" in schema:
            return f"[{', '.join(expected(item) for item in schema['prefixItems'])}]"
        case "array":
            length = f" of {schema.get('minItems', 0)} to {schema['maxItems']}" if "maxItems" in schema else ""
            return f"a list{length}, each {expected(schema['items'])}"
        case "boolean":
            return "true or false"
        case "string":
            text = "a path" if schema.get("format") == "path" else "text"
            like = f" like {schema['pattern'].strip('^$')}" if "pattern" in schema else ""
            most = f" of 1 to {schema['maxLength']} printable characters" if "maxLength" in schema else ""
            return text + most + like
        case kind:
            return str(kind)


SPECS = presets("launch/specs")
"""Folder of the run specs that come with this package."""
DEFAULT_SPEC = SPECS / "digits.yaml"
"""Default run spec."""

"""Models of the two configuration files, trees of :class:`Section`, and checks of arguments. Does not import torch.

A field's docstring is its documentation; everything else about it is read from its JSON schema, in which ``reason`` may
say why other values are refused.
"""

import builtins
import difflib
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError

from ddpm_ds.ground.errors import MOST_FAULTS, SpecError
from ddpm_ds.ground.units import limit

MOST_EXACT = 2**53
"""Largest number up to which floats represent every whole number."""
REMOVED = object()
"""Value that removes a key where keys of a section are changed."""
P = ParamSpec("P")
T = TypeVar("T")


class Section(BaseModel):
    """Frozen section of a configuration file, checked wherever it is given; an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        revalidate_instances="always",
    )


def broken_rule(rule: str) -> PydanticCustomError:
    """Return the error of a validator whose value breaks a rule, such as "can't be a path: it has a null byte"."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule})


def no_switch(value: object) -> object:
    """Refuse true and false where 0 and 1 are choices, since they are equal in Python."""
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


@dataclass(frozen=True)
class Needs:
    """Mark of a field whose value needs conditions, by :func:`only_with` or :func:`needs`."""

    conditions: tuple[str | Callable[[], str], ...]
    value: str = ""
    """The value that needs them, in YAML; "*" is any but the default. "" marks a field that is unused without them."""

    @property
    def texts(self) -> list[str]:
        """Conditions as text."""
        return [one if isinstance(one, str) else one() for one in self.conditions]

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        if self.value:
            schema.setdefault("needs", {})[self.value] = self.texts
        else:
            schema["only_with"] = self.texts
        return schema


def only_with(*conditions: str | Callable[[], str]) -> Needs:
    """Return the mark of a field whose default is its only value unless all conditions are met.

    A condition is a key, which must be set or true, or ``key=value|value``; `` or `` joins alternatives. A key without
    a dot belongs to the same section. A function returns the condition where names may be registered later.
    """
    return Needs(conditions)


def needs(value: str, *conditions: str | Callable[[], str]) -> Needs:
    """Return the mark of a field with a value, or "*" for any, that needs conditions as in :func:`only_with`."""
    return Needs(conditions, value)


def refuse(rules: Mapping[str, object]) -> None:
    """Raise ValueError with the first message whose rule is broken."""
    for message, broken in rules.items():
        if broken:
            raise ValueError(message)


def unused(root: object, within: str = "") -> Iterator[tuple[str, str, list[str]]]:
    """Yield dotted keys whose values break a :class:`Needs`, each with its message and the keys it needs."""
    section = value_at(root, within.rstrip("."))
    for name, about in type(section).model_fields.items():
        key, value, usual = within + name, getattr(section, name), about.default
        marks = [(mark, one) for mark in about.metadata if isinstance(mark, Needs) for one in mark.texts]
        for mark, condition in marks:
            if value == usual or mark.value not in ("", "*", plain(value)):
                continue
            parted = (way.partition("=") for way in condition.split(" or "))
            ways = [
                (other if "." in other else within + other, values.split("|") if values else [])
                for other, _, values in parted
            ]
            found = [(value_at(root, needed), choices) for needed, choices in ways]
            if not any(
                plain(each) in choices if choices else bool(each) or isinstance(each, Section)
                for each, choices in found
            ):
                words = " or ".join(f"{needed}: {' or '.join(choices)}".rstrip(": ") for needed, choices in ways)
                given = "" if isinstance(value, Section) else f"= {plain(value)} "
                fix = "" if isinstance(usual, Section) else f", or use {shown(usual)}"
                fault = f"needs {words}; give that" if mark.value else f"is used only with {words}; remove it"
                yield key, f"{given}{fault}{fix}", [needed for needed, _ in ways]
                break
        if isinstance(value, Section):
            yield from unused(root, f"{key}.")


def value_at(root: object, key: str) -> Any:
    """Return the value of a dotted key; None in a section that is null."""
    for name in filter(None, key.split(".")):
        root = getattr(root, name, None)
    return root


def plain(value: object) -> str:
    """Return a value as YAML writes it, without needless quotes."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(plain, value))}]"
    return shown(value).strip('"')


S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Format(Generic[S]):
    """Kind of configuration file, and the messages about its keys."""

    model: type[S]
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Names that people type, in any section, for a dotted key, which may be followed by its unit."""
    unknown: Callable[[str, object, Mapping[str, object]], str | None] = lambda key, value, values: None
    """Function of an unknown key, its value and the file that returns a message, or None for the usual one."""
    name: str = ""
    """Name of the section that is read alone; "" for a whole file."""
    section: str = "a section"
    """Words for a section."""
    lists_known: bool = True
    """Whether the keys of a section are few enough to be listed where one is unknown."""

    def read(self, values: Mapping[str, object]) -> S:
        """Return the model of ``values``: "64" is no number, true is not 1, 5e8 is whole; raises ValidationError."""
        return self.model.model_validate_json(json.dumps(_exact(values), default=str), strict=True)

    def faults(self, error: ValidationError, values: Mapping[str, object]) -> dict[tuple[str, ...], str]:
        """Return a message for each wrong key of ``values``, by location, without missing keys that were misspelt.

        Faults of the model's own check have the location () and a line for each message.
        """
        found: dict[tuple[str, ...], str] = {}
        meant: set[str] = set()
        last = ("rule", "missing")  # a missing key may be misspelt, and is compared with those found unknown
        for problem in sorted(error.errors(), key=lambda problem: problem["type"] in last):
            names = tuple(map(str, problem["loc"]))  # with list items and union members after the field's name
            depths = range(1, len(names))
            within = (
                names[:depth] for depth in depths if not (self.at(names[:depth]) or self.at((*names[:depth], "0")))
            )
            location = next(within, names)
            key = self.dotted(location)
            match problem["type"]:
                case "value_error":
                    return {(): "\n".join(problem["ctx"]["error"].args)}
                case "extra_forbidden":
                    meant.add(self.meant(location).partition(" ")[0])
                    found[location] = self.unknown_at(location, _at(values, location), values)
                case "json_invalid":  # the one fault that a JSON text of our own can have
                    found[()] = "a text has half of a surrogate pair, such as \\udcff; write the character itself"
                case "rule":
                    found[location] = f"{key} = {shown(_at(values, location))} {problem['msg']}"
                case "missing" if location == names:
                    if key not in meant:
                        found[location] = f"{key} is missing; it takes {self.takes(location)}"
                case _:
                    value = _at(values, location)
                    fix = self._fix(location, value)
                    found[location] = f"{key} = {shown(value)} should be {self.takes(location)}{fix}"

        def place(fault: tuple[tuple[str, ...], str]) -> list[float]:  # in the file; missing keys are last
            order, inside = list[float](), values
            for name in fault[0]:
                if isinstance(inside, list):
                    order, inside = [*order, int(name)], inside[int(name)]
                    continue
                if not isinstance(inside, dict) or name not in inside:
                    return [*order, math.inf]
                order.append([*inside].index(name))
                inside = inside[name]
            return order

        return dict(sorted(found.items(), key=place)[:MOST_FAULTS])

    def at(self, location: Sequence[str]) -> type[Section] | None:
        """Return the section at a location, or of an item of a list; None if a value is there, a list, or nothing."""
        model: Any = self.model
        listed = False
        for name in location:
            if listed and name.isdigit():
                listed = False
                continue
            field = None if listed else model.model_fields.get(name)
            kind = None if field is None else field.annotation
            options = (kind, *get_args(kind))  # a section, one or null, or a list of some
            sections = [option for option in options if isinstance(option, type) and issubclass(option, Section)]
            if not sections:
                return None
            listed = get_origin(kind) is tuple
            model = sections[0]
        return None if listed else model

    def dotted(self, location: Sequence[str]) -> str:
        """Return the key at a location as a message names it."""
        return ".".join(filter(None, (self.name, *location)))

    def unknown_at(self, location: Sequence[str], value: object, values: Mapping[str, object]) -> str:
        """Return the message about an unknown key of a file with these values."""
        key, meant, known = self.dotted(location), self.meant(location), self._names(location[:-1])
        if message := self.unknown(key, value, values):
            return message
        if location[-1] in known:
            return f"{key} is a value, not {self.section}; set it alone"
        if meant:
            return f"{key} is unknown; did you mean {meant}?"
        few = f"; known here: {', '.join(known)}" if self.lists_known else " or not supported here; remove it"
        return f"{key} is unknown{few}"

    def meant(self, location: Sequence[str]) -> str:
        """Return the dotted key that an unknown one may mean, perhaps with a unit; "" if there is none."""
        *sections, name = location
        known = self._names(sections)
        if (synonym := self.synonyms.get(".".join(location)) or self.synonyms.get(name)) and name not in known:
            return synonym
        if near := difflib.get_close_matches(name, known, n=1):
            return self.dotted([*sections, near[0]])
        elsewhere = [key for key in self.all_keys() if key.rpartition(".")[2] == name]
        return " or ".join(elsewhere) if len(elsewhere) < (2 if sections else 4) else ""

    def all_keys(self, within: tuple[str, ...] = ()) -> Iterable[str]:
        """Return all dotted keys, a section before those in it."""
        for name in self._names(within):
            yield ".".join((*within, name))
            yield from self.all_keys((*within, name))

    def takes(self, location: Sequence[str]) -> str:
        """Return words for the values of the field at a location."""
        if self.at(location):
            return f"{self.section} with {', '.join(self._names(location))}"
        return expected(self.schema(location))

    def schema(self, location: Sequence[str]) -> JsonSchemaValue:
        """Return the JSON schema of the field at a location; {} if there is none."""
        *sections, name = location
        section = self.at(sections)
        if section is None or name not in section.model_fields:
            return {}
        found = dict(_fields_of(section)[name])
        if callable(now := section.model_fields[name].json_schema_extra):
            now(found)  # a choice may have been added
        return found

    def field_at(self, key: str) -> FieldInfo:
        """Return the field of a dotted key."""
        *sections, name = key.split(".")
        section = self.at(sections)
        assert section is not None
        return section.model_fields[name]

    def file_schema(self) -> JsonSchemaValue:
        """Return the JSON schema of the file, for editors that complete and check it."""
        schema = self.model.model_json_schema()
        for section in (schema, *schema["$defs"].values()):
            for part in (section, *section["properties"].values()):
                if "description" in part:  # join a docstring's lines
                    part["description"] = " ".join(part["description"].split())
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

    def markdown(self, level: int = 2) -> str:
        """Return every section, field, type, default and docstring as Markdown with headings of this level."""
        schema = self.file_schema()
        lines: list[str] = []

        def add(name: str, section: JsonSchemaValue) -> None:
            within = []
            lines.extend([f"{'#' * level} `{name}`" if name else f"{'#' * level} Top level", ""])
            lines.extend([section["description"], "", "| key | type | default | meaning |", "|---|---|---|---|"])
            for key, part in section["properties"].items():
                dotted = f"{name}.{key}" if name else key
                options = (part, *part.get("anyOf", ()), part.get("items", {}))
                named = next((option["$ref"] for option in options if "$ref" in option), None)
                link = f"[`{dotted}`](#{dotted.replace('.', '')})"
                if named:
                    within.append((dotted, schema["$defs"][named.rpartition("/")[2]]))
                if named and "items" in part:
                    kind, default = f"a list of sections {link}", f"`{json.dumps(part['default'])}`"
                elif named:
                    kind = f"{self.section.partition(' ')[2]} {link}"
                    default = "" if key in section.get("required", ()) else "all defaults"
                    others = [expected(option) for option in part.get("anyOf", ()) if "$ref" not in option]
                    kind = " or ".join([kind, *others])
                    default = default if part.get("default", {}) is not None else "`null`"
                else:
                    kind = expected(part)
                    required = key in section.get("required", ())
                    default = "**required**" if required else f"`{json.dumps(part['default'])}`"
                meaning = [part.get("description", "")]
                meaning += [f"Anything else is refused: {part['reason']}."] if "reason" in part else []
                needed = dict(part.get("needs", {}))
                always = [*part.get("only_with", ()), *needed.pop("*", ())]
                for value, conditions in ({"": always} | needed if always else needed).items():
                    texts = ", and ".join(f"`{one.replace('|', ' or ')}`" for one in conditions)
                    meaning += [f"{value} only with {texts}." if value else f"Only with {texts}."]
                line = f"| `{key}` | {kind} | {default} | {' '.join(filter(None, meaning))} |"
                lines.append(line.replace("  ", " "))
            lines.append("")
            for dotted, inside in within:
                add(dotted, inside)

        add("", schema)
        return "\n".join(lines)

    def _names(self, location: Sequence[str]) -> list[str]:
        section = self.at(location)
        return list(section.model_fields) if section else []

    def _fix(self, location: tuple[str, ...], value: object) -> str:
        """Return the fix of a wrong value: its clear meaning, such as "False" or null, or the reason."""
        if is_off(value) and self.at(location):
            section = self.at(location[:-1])
            return "" if section is None or section.model_fields[location[-1]].is_required() else "; remove it"
        schema = self.schema(location)
        choices = [choice for option in (schema, *schema.get("anyOf", ())) for choice in _choices(option)]
        spelt = {json.dumps(choice).strip('"').lower(): choice for choice in choices}
        off = [choice for choice in choices if is_off(choice)]
        if is_off(value) and off:
            return f"; write {json.dumps(off[0])}"
        if value != "auto" and (near := difflib.get_close_matches(shown(value).strip('"').lower(), spelt, n=1)):
            return f"; did you mean {json.dumps(spelt[near[0]])}?"
        reasons = (self.schema(location[:depth]).get("reason") for depth in range(len(location), 0, -1))
        reason = next(filter(None, reasons), "nothing fills it" if value == "auto" else "")
        return f"; {reason}" if reason else ""


def is_off(value: object) -> bool:
    """Return whether a value switches its key off, in one of the forms that people write."""
    if isinstance(value, dict):
        return is_off(value.get("enabled", value.get("device")))
    return value is None or (isinstance(value, int | float | str) and value in (False, "none"))


def shown(value: object) -> str:
    """Return a value as JSON, or its type if JSON has nothing like it, shortened to fit a line; 5.0 is 5."""
    try:
        text = json.dumps(_number(value), default=str)
    except (TypeError, ValueError):  # a list that holds itself, or thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


@functools.cache
def _fields_of(section: type[Section]) -> Mapping[str, JsonSchemaValue]:
    """Return the JSON schema of each field of a section, with the choices that there were at the first call."""
    fields: Mapping[str, JsonSchemaValue] = section.model_json_schema()["properties"]
    return fields


def _at(values: Any, location: Sequence[str]) -> Any:
    for name in location:
        values = values[int(name)] if isinstance(values, list) else values[name]
    return values


def _exact(value: object) -> object:
    """Return a value in which floats that are whole numbers are integers, which fields of either kind take."""
    if isinstance(value, dict):
        return {key: _exact(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    return _number(value)


def _number(value: object) -> object:
    """Return a value, as an integer if it is a float that is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= MOST_EXACT else value


def _choices(schema: JsonSchemaValue) -> list[object]:
    """Return the only values that a JSON schema allows; [] if they are not listed."""
    if schema.get("type") == "boolean" and "const" not in schema:
        return [True, False]
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def expected(schema: JsonSchemaValue) -> str:
    """Describe a field's JSON schema in words."""
    if "$ref" in schema:
        return f"a {schema['$ref'].rpartition('/')[2]}"
    if "anyOf" in schema:
        return " or ".join(option.get("description") or expected(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " or ".join(map(json.dumps, _choices(schema)))
    match schema["type"]:
        case "integer" | "number" as kind:
            signs = (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))
            number = "a whole number" if kind == "integer" else "a number"
            if schema.get("multipleOf") == 2:
                number = "an even whole number"
            if "minimum" in schema and "maximum" in schema:
                return f"{number} from {limit(schema['minimum'])} to {limit(schema['maximum'])}"
            limits = [f"{sign} {limit(schema[name])}" for name, sign in signs if name in schema]
            return " ".join([number, " and ".join(limits)]).strip()
        case "object" if isinstance(of := schema.get("additionalProperties"), dict):
            return f"names, each with {expected(of)}"
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


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` with arguments converted and checked by its annotations; a fault is one SpecError line."""
    signature = inspect.signature(function)

    @functools.cache  # made at the first call, since it takes milliseconds
    def model() -> type[BaseModel]:
        names = _Names(vars(builtins) | vars(inspect.getmodule(function)))
        hints = get_type_hints(function, localns=names, include_extras=True)
        fields: dict[str, Any] = {name: (hints[name], None) for name in signature.parameters}
        config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
        return create_model(function.__name__, __config__=config, **fields)

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        bound = signature.bind(*args, **options)
        try:
            given = model().model_validate(bound.arguments)
        except ValidationError as error:
            raise SpecError(f"{function.__name__}: {_argument_fault(error, bound.arguments)}") from None
        bound.arguments.update({name: getattr(given, name) for name in bound.arguments})
        return function(*bound.args, **bound.kwargs)

    return call


def _argument_fault(error: ValidationError, arguments: Mapping[str, object]) -> str:
    problem = error.errors()[0]
    name, *within = map(str, problem["loc"])
    key, value, message = name, arguments[name], problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":  # from a check of our own, already one line
        return message
    if isinstance(value, BaseModel) and within:  # a spec that was changed without being checked
        key, value = ".".join([name, *within]), problem["input"]
    if problem["type"] == "rule":
        return f"{key} = {shown(value)} {message}"
    takes = dict.fromkeys(one["msg"] for one in error.errors() if one["loc"][0] == name)
    return f"{key} = {shown(value)}: {' or '.join(one[:1].lower() + one[1:] for one in takes)}"


class _Names(dict[str, object]):
    """Names in annotations. One that is imported for type checkers alone stands for any type."""

    def __missing__(self, name: str) -> object:
        return Any


TEXT_CHARACTERS = 6000  # MLflow's limit for the value of a param


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Return nested mappings as dotted names (``unet.channels``) and text, with values cut to MLflow's limit."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat[f"{prefix}{name}"] = text[:TEXT_CHARACTERS]
    return flat

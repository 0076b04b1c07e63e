"""What a printed JSON schema says of a value and what the reader does with it are one thing."""

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from ddpm_ds.config.ds_model import DS_CONFIG
from ddpm_ds.config.spec_file import DEFAULT_SPEC, SPEC, load_spec
from ddpm_ds.data.spec import BucketsSpec, ConditionSpec, TextSpec
from ddpm_ds.ground.errors import SpecError
from ddpm_ds.schema.section import Format, Section, unused
from tests.launching import REPOSITORY

VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 64, 0.5, 1.0, 1e-3, 5e8, 10**30, 2**53 + 1]
VALUES += ["", "0", "1", "64", "1e-3", "true", "False", "off", "none", "auto", "x", "x" * 5000]
VALUES += [[1, 1], [0.5, "0.9"], [0.9, 0.99], ["1"], [[]], {"enabled": 0}, {"enabled": "false"}, {"enabled": False}]
FILES: list[tuple[Format[Any], dict[str, Any]]] = [
    (SPEC, yaml.safe_load((REPOSITORY / "launch" / "specs" / "digits.yaml").read_text())),
    (DS_CONFIG, json.loads((REPOSITORY / "ds_configs" / "zero2_fp16.json").read_text())),
]


def kind_of(value: Any) -> set[str]:
    """JSON's types of a value."""
    names = {bool: "boolean", str: "string", list: "array", dict: "object", int: "integer", float: "number"}
    whole = {"integer", "number"} if type(value) in (int, float) and value == int(value) else set()
    return whole | {names.get(type(value), "null")}


def allows(schema: Mapping[str, Any], value: Any, of: Mapping[str, Any]) -> bool:
    """Whether a JSON schema allows a value, by the keywords that are used here; its file has the definitions ``of``."""
    if "$ref" in schema:
        return allows(of[schema["$ref"].rpartition("/")[2]], value, of)
    if "anyOf" in schema:
        return any(allows(option, value, of) for option in schema["anyOf"])
    kinds, choices = kind_of(value), schema.get("enum", [schema["const"]] if "const" in schema else [value])
    if (
        not any(value == one and kinds & kind_of(one) for one in choices)
        or schema.get("type", next(iter(kinds))) not in kinds
    ):
        return False
    if "number" in kinds or "integer" in kinds:
        above, below = schema.get("exclusiveMinimum", value - 1), schema.get("exclusiveMaximum", value + 1)
        fits = schema.get("minimum", value) <= value <= schema.get("maximum", value)
        return (
            fits
            and (above < value or value - 1 == value)
            and value < below
            and not value % schema.get("multipleOf", value or 1)
        )
    if isinstance(value, str):
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return fits and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        items = [*schema.get("prefixItems", []), *[schema.get("items", {})] * len(value)]
        fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return fits and all(allows(*each, of) for each in zip(items, value, strict=False))
    inside = schema.get("properties", {})
    more = schema.get("additionalProperties", True)
    more = {True: {}, False: {"enum": []}}[more] if isinstance(more, bool) else more
    return not isinstance(value, dict) or all(allows(inside.get(name, more), each, of) for name, each in value.items())


@pytest.mark.parametrize(("file", "given"), FILES, ids=["spec", "ds_config"])
def test_the_reader_takes_what_the_schema_allows_and_nothing_else(file: Format[Any], given: dict[str, Any]) -> None:
    """Except for rules that no schema can say: a possible path, printable text, rising cuts."""
    of = file.file_schema()["$defs"]
    wrong = []
    for key in file.all_keys():
        location = tuple(key.split("."))
        for value in VALUES:
            values = place = copy.deepcopy(given)
            for name in location[:-1]:
                place[name] = place = place.get(name) or {}
            place[location[-1]] = value
            try:
                file.read(values)
                faults = []
            except ValidationError as error:
                faults = [each for each in error.errors() if tuple(map(str, each["loc"]))[: len(location)] == location]
            kinds = {fault["type"] for fault in faults} - {"missing"}  # keys of a section beside those that are given
            if "rule" not in kinds and allows(file.schema(location), value, of) is bool(kinds):
                wrong.append(f"{key} = {json.dumps(value)[:40]}: the reader says {kinds or 'nothing'}")
    assert not wrong


def changed(section: Section, key: str, value: Any) -> Any:
    """The model with a value at a dotted key, which is not checked; a section that is null is made."""
    name, _, inside = key.partition(".")
    if inside:
        within = getattr(section, name)
        made = {"condition": ConditionSpec(), "text": TextSpec(encoders="clip"), "buckets": BucketsSpec()}
        value = changed(within if isinstance(within, Section) else made[name], inside, value)
    return section.model_copy(update={name: value})


RULES = [
    (file, given, key, value, conditions, number)
    for file, given in FILES
    for key in file.all_keys()
    for schema in [file.schema(key.split("."))]
    for value, conditions in ({"": schema.get("only_with", ())} | schema.get("needs", {})).items()
    for number in range(len(conditions))
]


@pytest.mark.parametrize(
    ("file", "given", "key", "value", "conditions", "broken"),
    RULES,
    ids=[f"{key}-{rule[number]}" for *_, key, _, rule, number in RULES],
)
def test_a_value_is_taken_with_all_the_conditions_of_its_schema_and_refused_without_one(
    file: Format[Any], given: dict[str, Any], key: str, value: str, conditions: list[str], broken: int
) -> None:
    section = key.rpartition(".")[0]

    def ways(condition: str) -> list[tuple[str, str]]:
        pairs = (way.partition("=") for way in condition.split(" or "))
        return [
            (needed if "." in needed or not section else f"{section}.{needed}", words) for needed, _, words in pairs
        ]

    model = changed(file.read(given), key, yaml.safe_load(value) if value.isalnum() or "_" in value else [1.5])
    schema = file.schema(key.split("."))
    for condition in (*schema.get("only_with", ()), *schema.get("needs", {}).get("*", ()), *conditions):
        for needed, choices in ways(condition):
            model = changed(model, needed, yaml.safe_load(choices.partition("|")[0] or "true"))
    assert key not in [found for found, *_ in unused(model)]
    for needed, choices in ways(conditions[broken]):
        model = changed(model, needed, "another" if choices else None)
    ((fault, keys),) = [(fault, keys) for found, fault, keys in unused(model) if found == key]
    words = [
        f"{needed}{': ' if choices else ''}{choices.replace('|', ' or ')}"
        for needed, choices in ways(conditions[broken])
    ]
    means, fix = ("needs", "give that") if value else ("is used only with", "remove it")
    assert keys == [needed for needed, _ in ways(conditions[broken])]
    assert fault.startswith(f"= {value.replace('*', '') or '[1.5]'} {means} {' or '.join(words)}; {fix}")


@pytest.mark.parametrize(
    ("before", "value", "needs"),
    [
        ([], "data.split=test", "data.source: huggingface"),
        ([], "data.held_out_path=val", "data.source: folder or "),
        (["data.condition.grid_channels=4"], "data.condition.cut=[0.1, 0.2]", "data.condition.kind: cut_out"),
        (["diffusion.schedule=flow", "diffusion.objective=velocity"], "diffusion.weighting=p2", "diffusion.schedule: "),
    ],
)
def test_the_fault_is_one_line_and_its_advice_is_typed(before: list[str], value: str, needs: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(DEFAULT_SPEC, [*before, value])
    key, _, given = value.partition("=")
    found = re.fullmatch(
        rf".*: {re.escape(f'{key} = {given} is used only with {needs}')}.*; remove it, or use (.*)", str(caught.value)
    )
    assert found is not None, caught.value
    assert load_spec(DEFAULT_SPEC, [*before, f"{key}={found[1]}"]) == load_spec(DEFAULT_SPEC, before)

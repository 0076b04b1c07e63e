"""Sizes and speeds as people write them, and what is said of others."""

import argparse
import ast
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds import load_spec, load_trained, open_run
from ddpm_ds.cli.main import make_parser
from ddpm_ds.config.ds_config import check_ds_config, read_ds_config, set_key
from ddpm_ds.config.ds_model import DS_CONFIG, REFUSED
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import DEFAULT_SPEC, JSON_PREFIX, SPEC, SPECS, SYNONYMS
from ddpm_ds.data.spec import ConditionSpec, TextSpec
from ddpm_ds.ground.errors import OptionError, SpecError, UserError
from ddpm_ds.ground.options import file_path, link_speed, memory_size, teraflops
from ddpm_ds.ground.outputs import cache_folder
from ddpm_ds.schema.section import Section
from tests.ds_json import laid_out
from tests.forking import REPOSITORY


def test_units_and_spellings_that_are_understood() -> None:
    sizes = {"80GiB": 80 * 2**30, "24GB": 24 * 10**9, "1.5 TiB": 3 * 2**39, "512MiB": 2**29}
    assert {text: memory_size(text) for text in sizes} == sizes
    speeds = {"300GB/s": 300e9, "400Gbit/s": 50e9, ".5MiB/s": 2**19}
    assert {text: link_speed(text) for text in speeds} == speeds
    assert teraflops("120") == 120e12


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (memory_size, "80", "'80' has no unit; give a size such as 80GiB or 24GB"),
        (memory_size, "80gib", "'80gib' has unknown unit 'gib'; write 80GiB"),
        (memory_size, "0GiB", "'0GiB' is not a size such as 80GiB or 24GB"),
        (link_speed, "300GB", "'300GB' has unknown unit 'GB'; give a speed such as 300GB/s"),
        (teraflops, "fast", "'fast' is not a number of TFLOP/s such as 120"),
    ],
)
def test_other_spellings_are_refused_in_a_line(parse: Callable[[str], float], text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        parse(text)
    assert "\n" not in str(raised.value)


def test_a_folder_of_somebody_else_can_not_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OptionError, match=r"can't be used \(Permission denied\)"):
        file_path(str(tmp_path))
    assert file_path(str(tmp_path / "file")) == tmp_path / "file"
    assert file_path(str(tmp_path / "new")) == tmp_path / "new"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def actions_of(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from actions_of(inner)
        else:
            yield parser, action


ACTIONS = [*actions_of(make_parser())]
PATHS = re.compile(r"DIR|FILE|FOLDER|PATH|JSON|YAML|PNG|BASE|OUT|RUN|CHECKPOINT")
"""Placeholders of paths in the help of the command line."""


def test_every_path_on_the_command_line_may_begin_with_a_home_folder(home: Path) -> None:
    paths = [action for _, action in ACTIONS if PATHS.search(str(action.metavar))]
    assert len(paths) > 40
    for action in paths:
        assert str(action.type("~/a b")) == str(home / "a b"), action  # type: ignore[operator,misc]
    own = [action for _, action in ACTIONS if action.type is file_path]
    assert {*map(id, own)} <= {*map(id, paths)}, "a placeholder of a path that this test does not know"
    with pytest.raises(OptionError, match=r"no home folder of this name is known; write it out"):
        file_path("~nobody-of-this-name/x")


def test_two_dashes_are_no_value_of_any_option() -> None:
    options = [(parser, action) for parser, action in ACTIONS if action.option_strings and action.nargs in (None, "?")]
    assert len(options) > 100
    reader = make_parser()
    for parser, action in options:
        for name in action.option_strings:
            with pytest.raises(SpecError, match=r"^argument .*: -- is no value; .* --help explains$"):
                reader.parse_args([*parser.prog.split()[1:], f"{name}=--" if name[:2] == "--" else f"{name}--"])


def test_every_path_in_files_in_overrides_and_in_python_may_begin_with_a_home_folder(home: Path) -> None:
    fields = [(name, key) for name, field in RunSpec.model_fields.items() for key in _paths(field.annotation)]
    assert len(fields) == 6
    assert ConditionSpec(path="~/x").path == home / "x"  # type: ignore[arg-type]
    assert TextSpec(encoders="~/x").encoders == str(home / "x")
    assert TextSpec(encoders="OWNER/NAME").encoders == "OWNER/NAME"
    spec = load_spec("digits")
    for section, key in ((getattr(spec, name), key) for name, key in fields):
        changed = type(section).model_validate(section.model_dump() | {key: "~/x"})
        assert getattr(changed, key) == home / "x"
    assert load_spec("digits", ["data.store_root=~/x"]).data.store_root == home / "x"
    with pytest.raises(SpecError, match=r'data.store_root = "~nobody-of-this-name" can\'t be a path: no home folder'):
        load_spec("digits", ["data.store_root=~nobody-of-this-name"])
    profiled = read_ds_config("zero2_fp16", ["ds.flops_profiler.enabled=true", "ds.flops_profiler.output_file=~/x"])
    resolved = laid_out(profiled, spec, world_size=1, stages=1, path="zero2_fp16")
    assert resolved.config.flops_profiler.output_file == home / "x"
    assert cache_folder() == home / ".cache" / "ddpm_ds"
    home.mkdir()
    (home / "spec.yaml").write_text((SPECS / "digits.yaml").read_text())
    assert load_spec("~/spec.yaml") == open_run("~").spec == spec
    (home / "empty.json").write_text("{}")
    assert read_ds_config("~/empty.json") == {}
    with pytest.raises(UserError, match=f"{home}/none"):
        load_trained("~/none")


def _paths(section: Any) -> list[str]:
    fields = section.model_fields if isinstance(section, type) and issubclass(section, Section) else {}
    return [key for key, field in fields.items() if "Path" in str(field.annotation)]


def strings_of(path: Path) -> Iterator[tuple[str, str]]:
    """All strings of a module with where they stand; what a message fills in is …, and a line goes on after a \\."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        yield f"{path.name}:{node.lineno}", text.replace("\\\n", " ")


STRINGS = [item for path in sorted((REPOSITORY / "ddpm_ds").rglob("*.py")) for item in strings_of(path)]
PAGES = [(path.name, path.read_text().replace("\\\n", " ")) for path in sorted((REPOSITORY / "docs").glob("*.md"))]
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OPTIONS: dict[str, set[str]] = {}
for _parser, _action in ACTIONS:
    OPTIONS.setdefault(" ".join(_parser.prog.split()[1:]), set()).update(_action.option_strings)
for _verb in ("run", "sweep"):  # they pass them on
    OPTIONS[_verb] |= OPTIONS["train"]
OTHERS = {
    "docker": {"--shm-size"},
    "mlflow": {"--backend-store-uri", "--experiment-id", "--artifacts-destination", "--default-artifact-root"},
    "diffusers' examples": {"--noise_offset"},
    "git": {"--abbrev", "--always", "--dirty"},
    "the sampler, before it is renamed": {"--kind"},
}
"""Options of other programs that our messages name, beside those of DeepSpeed's launcher."""


def test_every_option_that_a_message_names_exists() -> None:
    (deepspeed,) = importlib.util.find_spec("deepspeed").submodule_search_locations  # type: ignore[union-attr,misc]
    launcher = re.findall(r'"(--\w+)"', Path(deepspeed, "launcher", "runner.py").read_text())
    known = set().union(*OPTIONS.values(), *OTHERS.values(), launcher)
    named = [(where, option) for where, text in STRINGS for option in OPTION.findall(text)]
    assert len(named) > 100 and [each for each in named if each[1] not in known] == []


def test_every_command_in_a_message_or_a_page_has_a_verb_and_options_that_it_takes() -> None:
    wrong, count = [], 0
    for where, text in (*STRINGS, *PAGES):
        for verb, rest in re.findall(r"\bddpm-ds (checkpoint [a-z]+|[a-z]+)((?:(?!, )[^\n`;])*)", text):
            known = OPTIONS.get(verb, set())
            count += 1
            wrong += [
                (where, verb, option) for option in (OPTION.findall(rest) if known else [""]) if option not in known
            ]
    assert count > 50 and wrong == []


def test_every_key_that_a_message_names_exists() -> None:
    known = {*SPEC.all_keys(), *DS_CONFIG.all_keys(), *SYNONYMS, *REFUSED}
    dotted = re.compile(rf"(?<![\w./…-])(?:{'|'.join(RunSpec.model_fields)})(?:\.[a-z_]+)+(?![\w/(-])")
    files = (".png", ".dtype", ".spec")  # of samples, of a U-Net in Python, and of the package
    named = [(where, key) for where, text in STRINGS for key in dotted.findall(text) if not key.endswith(files)]
    assert len(named) > 100 and [each for each in named if each[1] not in known] == []


def test_every_value_that_a_message_says_to_set_is_one_of_its_key() -> None:
    wrong, count = [], 0
    for where, text in STRINGS:
        for item in re.findall(r"--set ((?:ds\.)?[a-z_]+(?:\.[a-z_]+)+=(?:\[[^]]*\]|[^\s;,)`'…]+))(?!…)", text):
            count += 1
            key, _, value = item.removeprefix(JSON_PREFIX).partition("=")
            try:
                if item.startswith(JSON_PREFIX):
                    config: dict[str, Any] = {}
                    set_key(config, key, value, item)
                    check_ds_config(config, Path("x.json"))
                else:
                    load_spec(DEFAULT_SPEC, [item])
            except UserError as error:  # other keys may be missing
                if re.search(rf"{re.escape(key)} (?:= \S+ should|is unknown|is a )", str(error)):
                    wrong.append((where, str(error)))
    assert count > 10 and wrong == []


def test_every_package_and_file_that_a_message_names_exists() -> None:
    extras = (REPOSITORY / "setup.cfg").read_text().partition("[options.extras_require]")[2]
    for where, text in (*STRINGS, *PAGES):
        for names in re.findall(r"ddpm_ds\[([\w,]+)\]", text):
            assert all(re.search(rf"^{name} =$", extras, re.MULTILINE) for name in names.split(",")), where
        for path in re.findall(r"(?<![\w./])(?:launch|docs|ds_configs)/[\w/]+\.(?:py|yaml|json|md)\b", text):
            assert (REPOSITORY / path).is_file(), (where, path)

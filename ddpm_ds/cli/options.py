"""Options of a verb as a frozen dataclass, from which its parser is made; options that several verbs have."""

from __future__ import annotations

import argparse
import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from ddpm_ds.ground.errors import OptionError, SpecError, print_to_stderr
from ddpm_ds.ground.options import HIDDEN, file_path, option
from ddpm_ds.tracking.run_folder import DS_CONFIG, SPEC

Options = TypeVar("Options")
Verbs: TypeAlias = "argparse._SubParsersAction[OneLineParser]"
"""Subparsers of ``ddpm-ds``."""
Device = Literal["auto", "cpu", "cuda"]
OVERWRITE = "replace files that exist"


class OneLineParser(argparse.ArgumentParser):
    """Parser that raises SpecError where argparse would exit; it prints descriptions as they are written."""

    def __init__(self, **options: Any) -> None:
        written = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**written, **options})

    def error(self, message: str) -> NoReturn:
        raise SpecError(f"{message}; {self.prog} --help explains")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and "--" in arg_strings:  # from --option=--; argparse would crash
            raise argparse.ArgumentError(action, "-- is no value")
        try:
            return super()._get_values(action, arg_strings)
        except OptionError as error:
            raise argparse.ArgumentError(action, error.args[0]) from None


class Verb:
    """Decorator that makes a function of ``options`` a verb of ``ddpm-ds``, with its docstring as help.

    The function returns an exit code; None is 0.
    """

    def __init__(self, run: Callable[[Any], int | None]) -> None:
        self.run, self.options = run, get_type_hints(run)["options"]

    def add(self, verbs: Verbs) -> OneLineParser:
        """Add the verb and return its parser."""
        name, description = self.run.__name__.strip("_").replace("_", "-"), inspect.getdoc(self.run) or ""
        about = description.partition(".\n")[0].removesuffix(".")
        parser = verbs.add_parser(name, help=f"{about[:1].lower()}{about[1:]}", description=description)
        add_options(parser, self.options)
        parser.set_defaults(verb=self)
        return parser

    def start(self, given: argparse.Namespace) -> int:
        """Run the verb with parsed options and return the exit code."""
        return self.run(read(self.options, given)) or 0


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add an option for each field that :func:`option` made, also those of nested dataclasses."""
    hints, exclusive = get_type_hints(options), dict[str, Any]()
    for field in fields(options):
        hint = hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            add_options(parser, hint)
        if not field.metadata:
            continue
        default = None if isinstance(field.default, tuple) else field.default
        values = {"default": default, **_of_type(hint), **field.metadata}
        if values["help"] == HIDDEN:
            values["help"] = argparse.SUPPRESS
        place: argparse._ActionsContainer = parser
        names = values.pop("names", (f"--{field.name.replace('_', '-')}",))
        if group := values.pop("group", getattr(options, "group", None)):
            known = [each for each in parser._action_groups if each.title == group[0]]
            place = known[0] if known else parser.add_argument_group(*group)
        if either := values.pop("either", None):
            if either not in exclusive:
                exclusive[either] = place.add_mutually_exclusive_group()
            place = exclusive[either]
        place.add_argument(*names, **(values if names[0][0] != "-" else {"dest": field.name, **values}))


def _of_type(hint: object) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` that a field's type decides."""
    if get_origin(hint) is UnionType:
        hint = next(each for each in get_args(hint) if each is not NoneType)
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    return {"type": file_path} if hint is Path else {}


def read(options: type[Options], given: argparse.Namespace) -> Options:
    """Return the parsed options; a missing one has its field's default."""
    values = dict[str, Any]()
    for name, hint in get_type_hints(options).items():
        if isinstance(hint, type) and is_dataclass(hint):
            values[name] = read(hint, given)
        elif (value := getattr(given, name, None)) is not None:
            values[name] = tuple(value) if isinstance(value, list) else value
    return options(**values)


def log_line(verb: str, line: str) -> None:
    """Print a line to stderr; that the terminal has been closed is no error."""
    with contextlib.suppress(OSError):
        print_to_stderr(f"ddpm-ds {verb}: {line}")


def without(words: Sequence[str], options: type[Any]) -> list[str]:
    """Return the words of a command line without these options and their values."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(parser, options)
    return parser.parse_known_args(words)[1]


@dataclass(frozen=True)
class SpecOptions:
    """Options of a program that reads a run spec; :func:`take_files` finds the spec if none is given."""

    spec: Path | None = option(f"run spec, see launch/specs (default: the run's own, {SPEC} of this folder)", "YAML")
    overrides: tuple[str, ...] = option(
        "change one value of the spec, or with ds.KEY=VALUE of the DeepSpeed JSON; may be repeated",
        "SECTION.KEY=VALUE",
        names=("--set",),
        action="append",
        default=(),
    )


@dataclass(frozen=True)
class ConfigOption:
    """Option of a program that reads a DeepSpeed JSON; :func:`take_files` finds the JSON if none is given."""

    deepspeed_config: Path | None = option(
        f"DeepSpeed JSON, see ds_configs (default: the run's own, {DS_CONFIG} of this folder)",
        "JSON",
        names=("--deepspeed_config",),
    )


@dataclass(frozen=True)
class Files:
    """Spec and JSON of a run, and the values that ``--set`` changes in them."""

    spec: Path
    overrides: tuple[str, ...]
    deepspeed_config: Path


def take_files(options: SpecOptions, usual: Path | None = None, *, needed: bool = True, quiet: bool = False) -> Files:
    """Return the spec and the JSON, and print a line if a file was not given but found.

    Files are looked for in the run's folder, unless the run begins anew, and in the current folder; then the ``usual``
    spec is taken. SpecError if there is no JSON and it is ``needed``.
    """
    run_dir = getattr(options, "run_dir", None)
    folders = [Path()] if run_dir is None or getattr(options, "resume", "") == "never" else [run_dir, Path()]
    taken, paths = list[str](), dict[str, Any]()
    for name, file, such, default in (
        ("spec", SPEC, "digits", usual),
        ("deepspeed_config", DS_CONFIG, "zero2_fp16", None),
    ):
        paths[name] = getattr(options, name, "")
        if paths[name] is not None:
            continue
        found = next((folder / file for folder in folders if (folder / file).is_file()), None)
        if found is None and default is None and needed:
            raise SpecError(f"--{name} is missing, and this folder has no {file}; type --{name} {such}")
        paths[name] = found or default
        taken += [f"--{name} {found}"] if found else []
    if taken and not quiet:
        print(f"taken        {' '.join(taken)}", flush=True)
    return Files(overrides=options.overrides, **paths)

"""Hostile specs, JSONs, options and files: one line, exit code 2, within seconds and a GiB, and nothing left behind."""

import argparse
import contextlib
import io
import json
import os
import resource
import signal
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from ddpm_ds.cli.main import main, make_parser
from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.config.ds_model import DS_CONFIG, REFUSED
from ddpm_ds.config.spec_file import SPEC
from ddpm_ds.ground.errors import LONGEST_LINE, MOST_FAULTS, UserError

pytestmark = pytest.mark.launch

REPOSITORY = Path(__file__).resolve().parents[1]
DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
ZERO2 = REPOSITORY / "ds_configs" / "zero2_fp16.json"
MOST_SECONDS, HANG_SECONDS = 5.0, 60
MOST_BYTES = 2**30
SPEC_KEYS = sorted(SPEC.all_keys())

profile = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate)
)
few, many = settings(profile, max_examples=40), settings(profile, max_examples=200)

NUMBERS = [0, -1, 1, 2, 3, 7, 64, 513, 65_537, 2**31, 10**9, 10**12, 10**15, 2**63, 10**39, -(10**39)]
FLOATS = [0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "auto", "nan", "inf", "-inf", "1e400", "9" * 5000, "a\nb", "\x1b[2J", "\u202e", "\ud800", "\0", "x" * 300]
TEXTS += ["x" * 10**5, "/" * 5000, "../..", "{}", "[" * 5000, "{a: " * 5000]
TEXTS += ["!!bool maybe", "*a", "&a [*a]", "~", "none"]
TEXTS += ["1-2", "3-1", "0x" + "f" * 5000, "1:" * 2000 + "1", "= ", "<<: 1", "1_000", "٣", "true", "80GiB", "9e99TiB"]
characters = st.characters(exclude_categories=["Cs"])
"""Those of UTF-8; asked for by that name, they are all encoded first, which takes a second."""
scalars = st.one_of(
    st.sampled_from([*NUMBERS, *FLOATS, *TEXTS, None, True, False]),
    st.integers(),
    st.floats(),
    st.text(characters, max_size=20),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(characters, max_size=8), inner, max_size=4),
)
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{after}: &{after} [{','.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)
RAW = [
    *(text.encode("utf-8", "surrogatepass") for text in TEXTS),
    LAUGHS.encode(),
    b"a: &a {b: *a}",
    b"name: &a\n  <<: *a",
    b"? [1, 2]\n: 3",
    b"!!binary aGk=: 1",
    b"\xff\xfe\x00",
    b"[" * 60_000,
    b'{"a":' * 10_000,
    b"1" * 60_000,
    b'{"train_batch_size": ' + b"1" * 400 + b"}",
    b'{"fp16.enabled": false}',
    b'{"fp16": {"enabled": true}, "fp16": {}}',
    b'["' + b"\\ud800" + b'"]',
    b" " * 10**6,
]


PARSER = make_parser()
"""Made once, since making it takes longer than most attacks."""


class TooSlowError(BaseException):
    """Error of an attack that has hung."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Fail what takes more than a GiB, seconds of a processor, or hangs."""

    def give_up(number: int, frame: object) -> None:
        raise TooSlowError(f"it hangs for {HANG_SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANG_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, before[1]))
    begin = time.process_time()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - begin < MOST_SECONDS


def attack(arguments: Sequence[str], folder: Path) -> str:
    """Run a verb and return its lines on stderr, one for each fault; empty where it takes the arguments."""
    here = sorted(folder.rglob("*"))
    out, err = io.StringIO(), io.StringIO()
    with (
        limited(),
        unittest.mock.patch("ddpm_ds.cli.main.make_parser", lambda: PARSER),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(folder),
    ):
        code = main(list(arguments))
    said = err.getvalue()
    assert sorted(folder.rglob("*")) == here, "it leaves something behind"
    if code != 0:
        assert code == 2 and said.endswith("\n") and said.count("\n") <= MOST_FAULTS
        for line in said[:-1].split("\n"):
            assert line.startswith("ddpm-ds: error: ") and line.isprintable() and len(line) < LONGEST_LINE + 100
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fuzz")
    (root / "work").mkdir()
    os.mkfifo(root / "pipe")
    (root / "loop").symlink_to(root / "loop")
    (root / "folder").mkdir()
    (root / "closed").touch(mode=0o000)
    with (root / "sparse").open("wb") as file:
        file.truncate(2**40)
    return root / "work"


def no_files(folder: Path) -> list[str]:
    names = ("pipe", "loop", "folder", "sparse", "loop/x", "pipe/x", "missing", "x" * 300, "zero\0byte", "d/" * 3000)
    return [str(folder.parent / name) for name in names] + ["/dev/zero", "/dev/null", "", "/proc/self/mem", "\udcff"]


def dry_run(spec: Path | str = DIGITS, config: Path | str = ZERO2, *options: str) -> list[str]:
    return ["train", "--spec", str(spec), "--deepspeed_config", str(config), "--dry-run", "--device", "cpu", *options]


def put(values: Any, dotted: str, value: object) -> None:
    *blocks, name = dotted.split(".")
    for block in blocks:
        if not isinstance(values.get(block), dict):
            values[block] = {}
        values = values[block]
    values[name] = value


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def fuzzed(**strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test a property of few examples, and of many of them as a long test."""
    parameters = [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.long)]

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("examples", parameters)
        def run(examples: settings, folder: Path) -> None:
            examples(given(**strategies)(test))(folder)

        run.__name__ = test.__name__
        return run

    return decorated


changes = st.tuples(st.sampled_from(SPEC_KEYS) | st.text(characters, max_size=12), values)
json_changes = st.tuples(st.sampled_from([*DS_CONFIG.all_keys(), *REFUSED]) | st.text(characters, max_size=12), values)


@fuzzed(changed=st.lists(changes, min_size=1, max_size=3))
def test_any_override_of_the_spec(folder: Path, changed: list[tuple[str, object]]) -> None:
    attack([*dry_run(), *(word for key, value in changed for word in ("--set", f"{key}={as_text(value)}"))], folder)


@fuzzed(changed=st.lists(json_changes, min_size=1, max_size=3))
def test_any_override_of_the_json(folder: Path, changed: list[tuple[str, object]]) -> None:
    words = [word for key, value in changed for word in ("--set", f"ds.{key}={as_text(value)}")]
    attack([*dry_run(), *words], folder)


@fuzzed(changed=st.lists(changes, min_size=1, max_size=3))
def test_any_value_in_the_spec(folder: Path, changed: list[tuple[str, object]]) -> None:
    spec = yaml.safe_load(DIGITS.read_text())
    for key, value in changed:
        put(spec, key, value)
    path = folder.parent / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, allow_unicode=False), errors="surrogatepass")
    attack(dry_run(path), folder)


@fuzzed(changed=st.lists(json_changes, min_size=1, max_size=3), top=st.booleans())
def test_any_value_in_the_json(folder: Path, changed: list[tuple[str, object]], top: bool) -> None:
    config = read_ds_config(ZERO2)
    for key, value in changed:
        if top:
            config[key] = value
        else:
            put(config, key, value)
    path = folder.parent / "config.json"
    path.write_text(json.dumps(config))
    attack(dry_run(DIGITS, path), folder)


def options_of(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words before each option's value on the command line."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, inner in action.choices.items():
                yield from options_of(inner, (*words, verb))
        elif action.option_strings and action.nargs is None:
            yield (*words, action.option_strings[0])


OPTIONS = list(options_of(PARSER))
TRAIN = [words[1] for words in OPTIONS if words[0] == "train" and words[1] not in ("--deepspeed_config", "--run-dir")]


@fuzzed(option=st.sampled_from(OPTIONS), value=scalars)
def test_any_value_of_any_option_is_parsed_or_refused(folder: Path, option: tuple[str, ...], value: object) -> None:
    with limited(), contextlib.suppress(UserError):
        PARSER.parse_args([*option[:-1], f"{option[-1]}={as_text(value)}"])


@fuzzed(given_options=st.lists(st.tuples(st.sampled_from(TRAIN), scalars), min_size=1, max_size=3))
def test_any_options_of_training(folder: Path, given_options: list[tuple[str, object]]) -> None:
    attack([*dry_run(), *(f"{name}={as_text(value)}" for name, value in given_options)], folder)


@fuzzed(content=st.sampled_from(RAW) | st.binary(max_size=200), is_spec=st.booleans())
@example(content=LAUGHS.encode(), is_spec=True)
def test_any_bytes_as_a_file(folder: Path, content: bytes, is_spec: bool) -> None:
    path = folder.parent / "raw"
    path.write_bytes(content)
    assert attack(dry_run(path) if is_spec else dry_run(DIGITS, path), folder)


def test_an_error_is_a_line_of_few_characters_whatever_it_holds() -> None:
    for text in ("\U000bab9b" * 10**4, "x" * 10**7, "\n" * 5000):
        line = str(UserError(f"file: {text}; fix"))
        assert line.isprintable() and len(line) < LONGEST_LINE + 10
        assert line.startswith("file: ") and line.endswith("; fix")


def test_special_files_are_refused_wherever_a_file_is_named(folder: Path) -> None:
    for path in no_files(folder):
        assert attack(dry_run(path), folder)
        assert attack(dry_run(DIGITS, path), folder)
        assert attack([*dry_run(), "--set", f"data.path={json.dumps(path)}"], folder)
        assert attack(["train", "--hostfile", path, "--dry-run", "--deepspeed_config", str(ZERO2)], folder)
        for verb in ("checkpoint list", "checkpoint verify", "checkpoint describe", "sample", "evaluate"):
            assert attack([*verb.split(), path], folder), (verb, path)

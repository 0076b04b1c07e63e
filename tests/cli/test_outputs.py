"""Files that a user names are written whole, and replace a file only with --overwrite, by every program."""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import check_gpu
import pytest
from rivals.command import main as bench

from ddpm_ds.cli.main import main, make_parser
from ddpm_ds.ground.errors import OutputError
from ddpm_ds.ground.outputs import writing
from tests.evaluate.planted import FAST, plant

PLAN = ["plan", "--spec", "SPEC", "--deepspeed_config", "JSON", "--processes", "1"]
VERBS = {
    "plan --out": [*PLAN, "--out", "FILE"],
    "plan --timeline": [*PLAN, "--timeline", "FILE"],
    "checkpoint consolidate out": ["checkpoint", "consolidate", "RUN", "FILE"],
}
"""Words of each verb that writes a file; all paths but FILE are missing, since the file is checked first."""
FOLDERS = {"export place", "import --out", "sample --out"}
"""Options that name another kind of output: a folder, which is never replaced, or a recorded run's."""
SCRIPTS: dict[str, tuple[Callable[[Sequence[str]], int], list[str]]] = {
    "bench.py": (bench, ["--spec", "SPEC", "--deepspeed_config", "JSON", "--json", "FILE"]),
    "check_gpu.py": (check_gpu.main, ["--out", "FILE"]),
}


LINK = "is a link, which is not written through; name the file itself"
REFUSALS = {
    "file": "exists; name another file, or replace it with --overwrite",
    "link": LINK,
    "broken link": LINK,
    "folder": "can't be written",
}
"""Message for each kind of existing path; only a file may be replaced."""


def options_of(parser: argparse.ArgumentParser, verb: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """Yield every option of every verb, with both names."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from options_of(inner, f"{verb}{name} ")
        else:
            yield f"{verb}{(action.option_strings or [action.dest])[-1]}", action


def test_no_verb_that_writes_is_left_out() -> None:
    helps = {name: action.help or "" for name, action in options_of(make_parser()) if action.metavar is not None}
    writes = {name for name, said in helps.items() if re.match("write |draw |file |folder to write", said)}
    assert writes == {*VERBS} | FOLDERS


@pytest.mark.parametrize("there", REFUSALS)
@pytest.mark.parametrize("name", [*VERBS, *SCRIPTS])
def test_existing_outputs_are_refused_before_anything_is_done(
    name: str, there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)  # so that check_gpu goes no further
    mine, file = tmp_path / "mine", tmp_path / "FILE"
    mine.write_text("mine")
    match there:
        case "file":
            mine.rename(file)
        case "folder":
            file.mkdir()
        case _:
            file.symlink_to(mine if there == "link" else tmp_path / "missing")
    run, words = SCRIPTS[name] if name in SCRIPTS else (main, VERBS[name])
    before = sorted(tmp_path.rglob("*"))
    assert run(words) == 2
    said = capsys.readouterr().err
    assert f"FILE {REFUSALS[there]}" in said
    assert run([*words, "--overwrite"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and (REFUSALS[there] in said) == (there != "file")
    assert sorted(tmp_path.rglob("*")) == before and (there != "file" or file.read_text() == "mine")


def test_a_file_is_replaced_whole_when_that_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(OutputError, match="exists; name another file"), writing(file, overwrite=False) as content:
        content.write(b"new")
    with pytest.raises(ZeroDivisionError), writing(file, overwrite=True) as content:
        content.write(b"half" * (1 // 0))
    assert file.read_text() == "old"
    with writing(file, overwrite=True) as content:
        content.write(b"new")
    assert file.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_what_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="exists"), writing(tmp_path / "file", overwrite=False) as content:
        content.write(b"ours")
        (tmp_path / "file").write_text("theirs")
    assert (tmp_path / "file").read_text() == "theirs"


def test_a_pipe_and_a_device_are_written_to(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from ddpm_ds.ground.outputs import writing
print("before", flush=True)
for path in ("/dev/stdout", "/dev/null"):
    with writing(Path(path), overwrite=path == "/dev/null") as content:
        content.write(b"written\\n")
print("after")
"""
    run = partial(subprocess.run, [sys.executable, "-c", code], text=True, stderr=subprocess.PIPE)
    assert run(stdout=subprocess.PIPE).stdout == "before\nwritten\nafter\n"
    with (tmp_path / "out").open("w") as file:
        done = run(stdout=file)
    assert "/dev/stdout is a link, which is not written through" in done.stderr and os.path.islink("/dev/stdout")


def test_samples_replace_another_file_only_when_that_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path / "run")
    (tmp_path / "x.npz").write_text("mine")
    words = ["sample", str(tmp_path / "run"), "--count", "1", *FAST, "--out", str(tmp_path / "x.npz")]
    assert main(words) == 2 and "exists; name another file, or replace it with --overwrite" in capsys.readouterr().err
    assert (tmp_path / "x.npz").read_text() == "mine"
    assert main([*words, "--overwrite"]) == 0 and main([*words, "--seed", "1"]) == 2
    assert main([*words, "--seed", "1", "--overwrite"]) == 0
    folder = tmp_path / "folder.npz"
    folder.mkdir()
    assert main([*words[:-1], str(folder), "--overwrite"]) == 2
    assert f"--out {folder} can't be written" in capsys.readouterr().err

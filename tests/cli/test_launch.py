"""``ddpm-ds train``: typed in a terminal, stopped with Ctrl-C, and continued with the command that it prints."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from ddpm_ds.cli import launch, train
from ddpm_ds.cli.launch import LaunchOptions, _outcome, _place
from ddpm_ds.cli.main import main
from ddpm_ds.ground.device import host_memory
from ddpm_ds.ground.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED, SpecError
from ddpm_ds.ground.units import gib
from ddpm_ds.processes.supervisor import Outcome, Place
from ddpm_ds.tracking import run_folder
from ddpm_ds.tracking.run_folder import EVENTS, append_event, ending
from tests.forking import REPOSITORY
from tests.launching import place_digits, run_ranks, tiny_spec
from tests.terminal import PROGRAM, Terminal

CONFIG = REPOSITORY / "ds_configs" / "zero1_fp32.json"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    quick = {"samples": {"every_images": None}, "evaluation": {"every_images": None}}
    train = {"images": 400, "batch_images": 16, "accumulation": 2}
    found = tiny_spec(train=train, logging={"log_every_images": 16}, **quick)
    path.write_text(yaml.safe_dump(found.model_dump(mode="json", exclude_defaults=True)))
    return path


@pytest.mark.launch
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_it_shows_what_it_does_saves_at_ctrl_c_and_the_command_that_it_prints_goes_on(
    processes: int, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process, since each imports PyTorch; ``test_preemption.py`` stops several forked ones."""
    place_digits(tmp_path)
    run_dir = tmp_path / "run"
    layout = f"--processes {processes} -p {processes}"
    words = f"train {layout} --deepspeed_config {CONFIG} --spec {spec} --run-dir {run_dir}"
    first = Terminal([*PROGRAM, *words.split()], tmp_path)
    first.read(lambda text: re.search(r"\d/400 images.* loss \d", text) is not None)
    first.process.send_signal(signal.SIGINT)
    assert first.ended() == EXIT_PREEMPTED, first.text
    shown = [
        f"starting     {processes} x python -m ddpm_ds.cli.rank",
        "starting PyTorch and DeepSpeed",
        "building the pipeline",
    ]
    places = [first.text.find(what) for what in shown]
    assert -1 not in places and places == sorted(places), first.text
    saved = re.fullmatch(rf"ddpm-ds train: saved after ([\d,]+) images in {run_dir}; go on with: (.*)", first.lines[-2])
    assert saved is not None, first.lines[-5:]
    first.assert_clean()

    def without_imports(program: Sequence[str], place: Place, **options: object) -> Outcome:
        """The ranks, which don't import PyTorch each."""
        done = run_ranks(place.processes, REPOSITORY / "launch" / "train.py", *program[2:], MLFLOW_TRACKING_URI="")
        assert f"images-{int(saved[1].replace(',', '')):09}" in done.stderr, "resumed"
        return Outcome(done.returncode)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(launch, "supervise", without_imports)
    a_little = ["--set", f"train.images={int(saved[1].replace(',', '')) + 32}"]
    assert main([*shlex.split(saved[2])[1:], *a_little]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"ddpm-ds train: done; draw from it with: ddpm-ds sample {run_dir}"


def test_a_dry_run_and_bad_input_take_no_launcher_and_no_torch(spec: Path, tmp_path: Path) -> None:
    words = ["train", "--deepspeed_config", str(CONFIG), "--spec", str(spec)]
    several = ["--processes 4 -p 2 --dry-run", "--processes 3 -p 2", "--processes 2 --hostfile hosts"]
    code = f"""
import contextlib, io, json, sys
from ddpm_ds.cli.main import main
found = []
for words in {[[*words, *options.split()] for options in several]!r}:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    found.append([code, said.getvalue(), sorted({{"torch", "deepspeed"}} & set(sys.modules))])
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    dry, uneven, twice = json.loads(done.stdout)
    assert dry[0] == 0 and "4 processes: 2 stages x 2 replicas" in dry[1]
    assert [uneven[0], twice[0]] == [EXIT_BAD_INPUT] * 2
    assert len(twice[1].splitlines()) == 1 and "--processes" in twice[1]
    assert [imported for _, _, imported in (dry, uneven, twice)] == [[]] * 3
    assert not list(tmp_path.glob("runs*"))


def test_a_run_that_a_second_signal_ends_is_killed_in_its_file_and_a_line_says_what_tells_mlflow(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"

    def supervise(*_: object, **__: object) -> Outcome:
        run_dir.mkdir()
        append_event(run_dir / EVENTS, {"start": {"output_root": str(tmp_path), "trackers": []}})
        return Outcome(128 + signal.SIGINT)

    monkeypatch.setattr(launch, "supervise", supervise)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    words = ["--deepspeed_config", str(CONFIG), "--spec", str(spec), "--processes", "1", "--device", "cpu"]
    assert main(["train", *words, "--run-dir", str(run_dir)]) == 128 + signal.SIGINT
    assert ending(run_dir / EVENTS) == "KILLED"
    assert f"not sent: 2 records to MLflow at sqlite:///{tmp_path}/mlflow.db" in (said := capsys.readouterr().err)
    assert f"to send them: ddpm-ds send {run_dir}\n" in said


def test_ranks_are_given_the_groups_that_the_planner_chose(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def supervise(program: list[str], *_: object, **__: object) -> Outcome:
        started.append(program)
        return Outcome(1)

    monkeypatch.setattr(launch, "supervise", supervise)
    words = ["--deepspeed_config", str(CONFIG), "--spec", str(spec), "--processes", "2", "--device", "cpu"]
    open_levels = ["--set", 'ds.pipeline.tensor={"size": 2, "levels": "auto"}']
    main(["train", *words, *open_levels, "--run-dir", str(tmp_path / "run")])
    ((*_, option, chosen, described),) = started
    assert (option, described) == ("--set", "--described") and re.fullmatch(
        r'ds\.pipeline\.tensor=\{"size": 2, "levels": \[0(, 1)?\]\}', chosen
    )


def test_a_hostfile_counts_processes_and_hosts(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    words = ["--deepspeed_config", str(CONFIG), "--spec", str(spec), "--hostfile", str(tmp_path / "hosts")]
    assert main(["train", *words, "-p", "2", "--run-dir", str(tmp_path / "run"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "4 processes: 2 stages x 2 replicas" in said and "hosts        2 x 2 processes" in said


def test_without_a_number_there_is_a_process_for_each_gpu_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "gpus", lambda: 4)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    options = LaunchOptions()
    assert [_place(options, asked).processes for asked in ("auto", "cuda", "cpu")] == [4, 4, 1]
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert [_place(options, asked).processes for asked in ("auto", "cuda", "cpu")] == [1, 4, 1]


def test_runs_that_begin_in_one_second_have_folders_of_their_own(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both under ``ddpm-ds train`` and under a launcher; a run that does not begin leaves no folder."""
    begun: list[Path] = []

    def supervised(command: Sequence[str], place: Place, **options: object) -> Outcome:
        begun.append(tmp_path / command[command.index("--run-dir") + 1])
        assert list(begun[-1].iterdir()) == []
        if len(begun) > 1:
            return Outcome(EXIT_BAD_INPUT)
        (begun[-1] / "checkpoints").mkdir()
        (begun[-1] / "checkpoints" / "latest").write_text("images-000064000\n")
        return Outcome(EXIT_PREEMPTED)

    def trained(draft: object, machine: object, run_dir: Path, *arguments: object) -> None:
        begun.append(tmp_path / run_dir)
        assert list(begun[-1].iterdir()) == []
        if len(begun) > 3:
            raise SpecError("refused")
        (begun[-1] / "spec.yaml").touch()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "new_run_dir", lambda name: Path("runs", f"20261101-120000-{name}"))
    monkeypatch.setattr(launch, "supervise", supervised)
    monkeypatch.setattr(train, "_train_with_others", trained)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    words = ["--deepspeed_config", str(CONFIG), "--spec", str(spec), "--device", "cpu"]
    assert main(["train", *words, "--dry-run"]) == train.main([*words, "--dry-run"]) == 0 and not Path("runs").exists()
    assert [main(["train", *words]), main(["train", *words])] == [EXIT_PREEMPTED, EXIT_BAD_INPUT]
    assert capsys.readouterr().err.splitlines()[-1].endswith("nothing was saved; see the error above")
    assert [train.main(words), train.main(words)] == [0, EXIT_BAD_INPUT]
    names = [path.name.removeprefix("20261101-120000-tiny") for path in begun]
    assert names == ["", "-2", "-2", "-3"] and sorted(Path("runs").iterdir()) == [
        Path("runs", "20261101-120000-tiny"),
        Path("runs", "20261101-120000-tiny-2"),
    ]


def test_the_last_line_names_the_save_and_the_next_command(tmp_path: Path) -> None:
    given = ["--spec", "my spec.yaml", "--resume", "never", "--run-dir", str(tmp_path)]
    again = f"ddpm-ds train --spec 'my spec.yaml' --run-dir {tmp_path}"
    assert _outcome(Outcome(75), tmp_path, given) == f"nothing was saved; start again with: {again}"
    for code in (1, EXIT_BAD_INPUT, 3):
        assert _outcome(Outcome(code), tmp_path, given) == "nothing was saved; see the error above"
    said = _outcome(Outcome(76, killed=True), tmp_path, given)
    assert f"killed, probably because this machine's {gib(host_memory())} of memory were full: " in said
    assert "ddpm-ds train" not in said
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("images-000064000\n")
    assert _outcome(Outcome(76), tmp_path, given) == f"saved after 64,000 images in {tmp_path}; go on with: {again}"

"""``ddpm-ds doctor``: hosts behind an ssh that stays on this machine, what differs, and what each one lacks."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ddpm_ds.cli.doctor import exported, report
from ddpm_ds.cli.main import main
from ddpm_ds.processes import preflight
from ddpm_ds.processes.preflight import Cell, Fleet, examined, look
from ddpm_ds.processes.ranks import free_port
from tests.launching import REPOSITORY, place_program

SSH = """#!/bin/sh
# Runs the last word as the shell of another host would; hosts named no-* can't be reached.
for word; do host=$before before=$word; done
case $host in
no-*) echo "login banner"; echo "ssh: Could not resolve hostname $host" >&2; exit 255 ;;
deaf) exec sleep 60 ;;
esac
echo "Welcome to $host"
exec env -i HOME="$HOME" PATH="$own:/usr/bin:/bin" sh -c "$word"
"""
HOSTNAME = "#!/bin/sh\necho 127.0.0.1\n"
SPEC = str(REPOSITORY / "launch" / "specs" / "digits.yaml")


def fleet(*hosts: str, **changes: Any) -> Fleet:
    options = {"folder": str(REPOSITORY), "environment": {"PYTHONPATH": str(REPOSITORY)}, "local": False, "seconds": 60}
    return Fleet(dict.fromkeys(hosts, 2), **{"python": sys.executable, **options, **changes})


def question(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"spec": SPEC, "overrides": [], "ds_config": None, "run_bytes": 0}
    return {**usual, "run_dir": str(tmp_path / "runs"), **changes}


@pytest.fixture
def own_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    for name, text in (("ssh", SSH.replace("$own", str(folder))), ("hostname", HOSTNAME), ("pdsh", "")):
        place_program(folder, name, text)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    for name in ("PDSH_SSH_ARGS", "PDSH_SSH_ARGS_APPEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("own_ssh")
def test_hosts_answer_and_one_that_does_not_says_why_and_what_helps(tmp_path: Path) -> None:
    odd = "two words; \"quotes\" 'and' $HOME `pwd` \\"
    named = fleet("one", "no-host", environment={"PYTHONPATH": str(REPOSITORY), "DS_ENV_FILE": odd})
    table = examined(named, question(tmp_path, overrides=["train.seed=7"]), free_port(), network=True)
    assert table["no-host"] == {
        "answers": Cell(
            "no",
            "ssh: Could not resolve hostname no-host",
            "this must work without a question, within --timeout-seconds: ssh -a -x no-host "
            + shlex.quote(f"cd {REPOSITORY} && {sys.executable} -c 'import ddpm_ds'"),
        )
    }
    assert [name.split()[0] for name in table["one"]] == ["answers", "devices", "free", "free"]
    assert table["one"]["answers"] == Cell("yes") and table["one"]["devices"].text.endswith("processors")
    for changes, why in (
        ({"folder": str(tmp_path / "none")}, "none"),
        ({"python": "/none/python"}, "/none/python"),
        ({"python": "/bin/false"}, "exit code 1"),
    ):
        (cell,) = examined(fleet("one", **changes), question(tmp_path), 1, network=False)["one"].values()
        assert cell.text == "no" and why in cell.why and cell.fix
    (cell,) = examined(fleet("deaf", seconds=1), question(tmp_path), 1, network=False)["deaf"].values()
    assert cell.why == "no answer in 1 s"
    assert list(tmp_path.iterdir()) == [tmp_path / "bin"]


@pytest.mark.long
@pytest.mark.usefixtures("own_ssh")
@pytest.mark.parametrize("seconds", [20, 5])
def test_hosts_add_up_and_a_network_that_fails_is_named(
    tmp_path: Path, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seconds == 5:
        monkeypatch.setattr(preflight, "address_of", lambda host: "192.0.2.7")  # of RFC 5737: no machine's
    table = examined(fleet("one", "two", seconds=seconds), question(tmp_path), free_port(), network=True)
    cells = [table[host]["all-reduce"] for host in ("one", "two")]
    assert all(cell == Cell("gloo") for cell in cells) if seconds == 20 else all(cell.why for cell in cells), cells


ALIKE = {"version of torch": "2.14.1", "ddpm_ds/*.py": "ab" * 32, "digits.yaml: train.seed": "3"}


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("version of torch", "2.11.0", "! b, version of torch: 2.11.0, others have 2.14.1; install the same versions"),
        ("version of torch", None, "! b, version of torch: missing, others have 2.14.1; install the same versions"),
        ("ddpm_ds/*.py", "cd" * 32, f"! b, ddpm_ds/*.py: {'cd' * 20}, others have {'ab' * 20}; bring all hosts to"),
        ("digits.yaml: train.seed", "7", "! b, digits.yaml: train.seed: 7, others have 3; give all hosts the same f"),
    ],
)
def test_only_what_differs_is_shown_with_both_values_and_the_fix(
    name: str, value: str | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {key: other for key, other in {**ALIKE, name: value}.items() if other is not None}
    answers = {"a": [ALIKE, {"devices": ["2 x H200", "", ""]}, 2], "b": [own, {"devices": ["2 x H200", "", ""]}, 2]}
    monkeypatch.setattr(Fleet, "ask", lambda *_: answers)
    text, good = report(examined(fleet("a", "b"), question(tmp_path), 1, network=False))
    header, a, b, _, finding, _, verdict = text.splitlines()
    assert not good and finding.startswith(line) and verdict == "2 hosts: 1 to fix"
    assert name in header and a.split()[:2] == ["a", "yes"] and " ! " in b
    answers["b"][0] = ALIKE
    text, good = report(examined(fleet("a", "b"), question(tmp_path), 1, network=False))
    assert good and [line.split()[0] for line in text.splitlines() if line] == ["answers", "a", "b", "2"]


def test_a_host_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault is looked for on this machine; none of them changes another cell."""
    monkeypatch.setattr(preflight, "processors", lambda: 2)
    monkeypatch.setattr(preflight, "gpus", lambda: 0)
    given: dict[str, Any] = {**question(tmp_path), "slots": 2}
    _, good, _ = look(**given)
    assert not any(cell.why for cell in good.values()), good
    for changes, column, said in (
        ({"slots": 3}, "devices", "2 processors for slots=3"),
        ({"run_bytes": 2**60}, "free for runs", "1073741824.00 GiB are needed"),
        ({"overrides": ["train.sed=1"]}, "files", "did you mean train.seed?"),
        ({"ds_config": str(tmp_path / "none.json")}, "files", "none.json"),
    ):
        _, cells, _ = look(**{**given, **changes})
        assert {name for name, cell in cells.items() if cell.why} == {column}, changes
        assert said in cells[column].why and cells[column].fix
    monkeypatch.setattr(preflight, "gpus", lambda: 1)
    assert look(**given)[1]["devices"] == Cell("1 GPU", "1 GPU for slots=2", "write slots=1")


def test_this_machine_alone_needs_no_ssh_and_no_name_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("getpass.getuser", Mock(side_effect=KeyError("uid")))
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    words = ["doctor", "--run-dir", str(tmp_path), "--master-port", str(free_port())]
    assert main(words) == 0
    assert capsys.readouterr().out.endswith("1 host: good\n") and os.environ["LOGNAME"] == str(os.getuid())
    (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*words, "--hostfile", str(tmp_path / "hostfile")]) == 2
    assert "ssh, which starts other hosts, is not on this machine" in capsys.readouterr().err


def test_hosts_are_asked_in_the_environment_that_deepspeed_gives_them() -> None:
    here = {"DS_ACCELERATOR": "cpu", "HOME": "/root", "MLFLOW_EXPERIMENT_NAME": "my digits", "PYTHONPATH": "/more"}
    secret = {"MLFLOW_TRACKING_PASSWORD": "hush", "MLFLOW_TRACKING_URI": "https://me:hush@server/"}
    assert exported(here | secret, {"OMP_NUM_THREADS": "2"}, "/project") == {
        "MLFLOW_EXPERIMENT_NAME": "my digits",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": "/project:/more",
    }

"""Files of launch/clusters: their variables start one run, their grace periods save it, platforms can read them."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpm_ds.cli import launch
from ddpm_ds.cli.main import main
from ddpm_ds.ground.errors import EXIT_BAD_INPUT, EXIT_BAD_NUMBERS, EXIT_PEER_LOST, EXIT_PREEMPTED
from ddpm_ds.ground.version import __version__
from ddpm_ds.processes.ranks import RUN_SECRET, on_several_hosts, set_environment
from ddpm_ds.processes.supervisor import Outcome, Place
from tests.forking import REPOSITORY
from tests.launching import place_program

CLUSTERS = REPOSITORY / "launch" / "clusters"
JOBSET = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())
TRAINJOB = yaml.safe_load((CLUSTERS / "trainjob.yaml").read_text())
SKYPILOT = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
JOB = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]
POD = JOB["template"]["spec"]
MASTER = "ddpm-ds-node-0-0.ddpm-ds"
VARIABLES: dict[str, list[dict[str, str]]] = {
    "jobset": [{"JOB_COMPLETION_INDEX": str(node)} for node in range(2)],
    "trainjob": [
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": str(node)}
        | {"PET_MASTER_ADDR": MASTER, "PET_MASTER_PORT": "29500"}
        for node in range(2)
    ],
    "skypilot": [
        {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
        | {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9"}
        for node in range(2)
    ],
}
"""Variables of each platform on two nodes, in the order of their ranks."""
MASTERS = {"jobset": MASTER, "trainjob": MASTER, "skypilot": "10.0.0.7"}


def typed(platform: str, variables: dict[str, str], home: Path) -> list[str]:
    """Return the words after ``ddpm-ds``: Kubernetes puts variables into a command, SkyPilot runs a shell script."""
    if platform == "skypilot":
        script = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
        place_program(home / "ddpm_ds" / "bin", "ddpm-ds", script)
        given = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
        done = subprocess.run(["bash", "-c", SKYPILOT["run"]], env=given, stdout=subprocess.PIPE, check=True)
        return list(json.loads(done.stdout))
    command = POD["containers"][0]["command"] if platform == "jobset" else TRAINJOB["spec"]["trainer"]["command"]
    assert command[0] == "ddpm-ds"
    return [re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word) for word in command[1:]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], Place]]:
    found: list[tuple[list[str], Place]] = []

    def supervised(program: Sequence[str], place: Place, **options: object) -> Outcome:
        found.append((list(program), place))
        return Outcome(0)

    monkeypatch.setattr(launch, "supervise", supervised)
    monkeypatch.setattr(launch, "gpus", lambda: 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return found


@pytest.mark.parametrize("platform", VARIABLES)
def test_the_variables_of_a_platform_make_the_ranks_of_one_run(
    platform: str, started: list[tuple[list[str], Place]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variables in VARIABLES[platform]:
        words = [word.replace("/runs/digits", str(tmp_path / "run")) for word in typed(platform, variables, tmp_path)]
        assert main([*words, "--device", "cpu", "--processes", "2"]) == 0
    ranks = [
        rank
        for variables, (_, place) in zip(VARIABLES[platform], started, strict=True)
        for rank in place.environments({"PATH": "", "HOME": str(tmp_path), **variables})
    ]
    numbers = [rank["RANK"] + rank["LOCAL_RANK"] + rank["CROSS_RANK"] for rank in ranks]
    assert numbers == ["000", "110", "201", "311"]
    assert all(str(tmp_path / "run") in " ".join(program) for program, _ in started)
    for rank in ranks:
        monkeypatch.setattr(os, "environ", rank)
        set_environment()
        world = (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["CROSS_SIZE"])
        assert world == ("4", "2", "2") and on_several_hosts() and RUN_SECRET not in rank
        assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == (MASTERS[platform], "29500")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nodes 2 --run-dir run", "--nodes 2 needs --master-addr HOST"),
        ("--nodes 2 --master-addr a", "--nodes 2 needs --run-dir DIR, a folder that all hosts share"),
        ("--nodes 2 --master-addr a --hostfile hosts --run-dir run", "--nodes and --hostfile both say where ranks run"),
        ("--nodes two --master-addr a", "argument --nodes: "),
        ("--nodes 2 --master-addr a --run-dir run --node-rank 2", "hosts are numbered from 0 to 1; give each its own"),
    ],
)
def test_half_of_what_several_hosts_need_is_refused_in_one_line(
    options: str, said: str, started: list[tuple[list[str], Place]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--deepspeed_config", "zero2_fp16", *options.split()]) == EXIT_BAD_INPUT and started == []
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_grace_periods_and_exit_codes_are_ours() -> None:
    patch = TRAINJOB["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    grace = patch["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    for command, seconds in (
        (POD["containers"][0]["command"], POD["terminationGracePeriodSeconds"]),
        (TRAINJOB["spec"]["trainer"]["command"], grace),
    ):
        assert int(re.search(r"--grace-seconds=(\d+)", shlex.join(command))[1]) + 30 <= seconds  # type: ignore[index]
    rules = {rule["action"]: rule["onExitCodes"]["values"] for rule in JOB["podFailurePolicy"]["rules"][:2]}
    assert rules == {"FailJob": [EXIT_BAD_INPUT, EXIT_BAD_NUMBERS], "Ignore": [EXIT_PREEMPTED]}
    assert SKYPILOT["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_PREEMPTED, EXIT_PEER_LOST]
    images = {POD["containers"][0]["image"], TRAINJOB["spec"]["trainer"]["image"]}
    assert images == {f"REGISTRY/ddpm_ds:{__version__}"}


@pytest.mark.parametrize(("name", "given"), [("JobsetV1alpha2JobSet", JOBSET), ("TrainerV1alpha1TrainJob", TRAINJOB)])
def test_kubernetes_files_have_the_keys_and_types_of_their_api(name: str, given: dict[str, Any]) -> None:
    """The API's models drop unknown keys, so all keys must come back."""
    from kubeflow_trainer_api import models

    def comes_back(given: Any, read: Any) -> None:
        if isinstance(given, dict):
            assert given.keys() <= read.keys()
            for key in given:
                comes_back(given[key], read[key])
        elif isinstance(given, list):
            for one, other in zip(given, read, strict=True):
                comes_back(one, other)
        else:
            assert given == read

    comes_back(given, getattr(models, name).from_dict(given).to_dict())

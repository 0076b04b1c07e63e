"""Hosts that differ, or lack something: which cell is marked, what its line says, and that it says a fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpm_ds.cli.doctor import findings
from ddpm_ds.cluster.checks import STEPS, check
from ddpm_ds.cluster.probe import Disk, Document, HostFacts
from ddpm_ds.cluster.survey import Ended, Failure, HostReport, PlannedRun, Survey, _failure
from ddpm_ds.processes.hosts import PACKAGES

GIB = 2**30
OMP = {"OMP_NUM_THREADS": "4"}
RUN = PlannedRun("/venv/bin/python", "/project", {}, OMP, "digits.yaml", (), "zero2.json", "runs", 4 * GIB)
FACTS = HostFacts(
    python="3.11.7",
    versions={**dict.fromkeys(PACKAGES, "2.13.1"), "ddpm_ds": "0.1.0"},
    sources={"ddpm_ds/cli/main.py": "aa", "ddpm_ds/errors.py": "bb"},
    spec=Document({"train.batch_images": "128", "name": '"digits"'}),
    ds_config=Document({"zero_optimization.stage": "2"}),
    disks={"run": Disk(100 * GIB, True, False), "data": Disk(100 * GIB, True, False)},
    images_missing="",
    cores=8,
    devices=(),
    environment=OMP,
    interfaces=("lo", "eth0"),
    addresses=("10.0.0.1",),
)


def survey(**changes: dict[str, Any]) -> Survey:
    """Hosts a, b and c that are alike but for changes by host: of facts, of the report, or ``failure`` alone."""
    hosts = {}
    for index, name in enumerate("abc"):
        change = changes.get(name, {})
        if "failure" in change:
            hosts[name] = HostReport(slots=2, failure=change["failure"])
            continue
        of_facts = {key: value for key, value in change.items() if key in HostFacts.__dataclass_fields__}
        hosts[name] = HostReport(
            slots=2,
            facts=replace(FACTS, **of_facts),
            run_dir_shared=None if name == "a" else True,
            interface="eth0",
            address=f"10.0.0.{index + 1}",
        )
        vars(hosts[name]).update({key: value for key, value in change.items() if key not in of_facts})
    return Survey(RUN, hosts, "a", "10.0.0.1")


def failure(at: str, why: str) -> dict[str, Any]:
    return {"failure": Failure(at, why)}


def lines(**changes: dict[str, Any]) -> list[str]:
    return findings(check(survey(**changes)))


def versions(**changed: str) -> dict[str, dict[str, str]]:
    return {"versions": {**FACTS.versions, **changed}}


GPU, OLD_GPU = "NVIDIA H200 141 GiB", "NVIDIA A100 80 GiB"
CASES: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "package": (
        {"b": versions(pydantic="2.11.0")},
        "! b, pydantic: 2.11.0, a has 2.13.1; pip install pydantic==2.13.1 on b",
    ),
    "the first host is the odd one": (
        {"a": versions(torch="2.10.0")},
        "! a, torch: 2.10.0, b has 2.13.1; pip install torch==2.13.1 on a",
    ),
    "package missing": (
        {"c": {"versions": {name: text for name, text in FACTS.versions.items() if name != "mlflow"}}},
        "! c, mlflow: missing, a has 2.13.1; pip install mlflow==2.13.1 on c",
    ),
    "python": ({"b": {"python": "3.12.1"}}, "! b, python: 3.12.1, a has 3.11.7; make the environment on b with Python"),
    "patch release": ({"b": {"python": "3.11.9"}}, "? b, python: 3.11.9, a has 3.11.7; "),
    "sources": (
        {"b": {"sources": {"ddpm_ds/cli/main.py": "cc", "ddpm_ds/errors.py": "bb"}}},
        "! b, source: not the sources of a: ddpm_ds/cli/main.py; git checkout the same commit on b, "
        "or there: rsync -a a:",
    ),
    "spec": (
        {"b": {"spec": Document({"train.batch_images": "64", "name": '"digits"'})}},
        "! b, spec: train.batch_images is 64 (a: 128); copy digits.yaml to b from a",
    ),
    "no spec": (
        {"b": {"spec": Document(error="digits.yaml: no such run spec")}},
        "! b, spec: digits.yaml: no such run spec; copy digits.yaml to b from a",
    ),
    "JSON": (
        {"c": {"ds_config": Document({})}},
        "! c, JSON: zero_optimization.stage is missing (a: 2); copy zero2.json to c from a",
    ),
    "images": (
        {"b": {"images_missing": "photos"}},
        "! b, images: data.path = photos does not exist; copy or mount the images on b at the same path",
    ),
    "run disk": (
        {"b": {"disks": {"run": Disk(3 * GIB, True, False)}}},
        "! b, free for runs: 3.00 GiB free, the checkpoints that are kept need 4.00 GiB; make room on b, or choose "
        "another folder with --run-dir",
    ),
    "data disk": (
        {"b": {"disks": {**FACTS.disks, "data": Disk(GIB // 2, True, False)}}},
        "! b, free for data: 0.50 GiB free, prepared images need 1.00 GiB; make room on b, or choose another folder "
        "with --set data.store_root=FOLDER",
    ),
    "read-only": ({"b": {"disks": {"run": Disk(9 * GIB, False, True)}}}, "! b, free for runs: the folder can't be wr"),
    "half shared": ({"b": {"run_dir_shared": False}}, "? b, run folder: does not see the folder that the other hosts"),
    "slots": ({"b": {"slots": 9}}, "? b, devices: slots=9 on 8 CPU cores; write b slots=8 into the hostfile"),
    "environment": (
        {"b": {"environment": {}}},
        "? b, environment: set here, but missing or different there: OMP_NUM_THREADS; write them into .deepspeed_env",
    ),
    "interface": (
        {"b": {"environment": {"OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "ens3"}}},
        "! b, interface: GLOO_SOCKET_IFNAME=ens3, but the interfaces to other hosts are eth0; leave it",
    ),
    "route": (
        {"b": {"route_error": "Network is unreachable"}},
        "! b, interface: no route to a at 10.0.0.1: Network is unreachable; name an address of a that all reach",
    ),
    "loopback": ({"b": {"address": "127.0.0.1"}}, "! b, interface: 10.0.0.1 is a loopback address, which other hosts"),
    "port taken": (
        {"a": {"port_error": "Address already in use"}},
        "! a, master port: port 29500 can't be used: Address already in use; end its user (ss -tlnp on a)",
    ),
    "port closed": (
        {"c": {"port_error": "no answer in 4 s"}},
        "! c, master port: a at 10.0.0.1:29500: no answer in 4 s; open TCP between the hosts in a's firewall, or",
    ),
    "GPUs": (
        {"a": {"devices": (GPU, GPU)}, "b": {"devices": (GPU,)}, "c": {"devices": (GPU, GPU)}},
        "! b, devices: 1 CUDA device for slots=2; write slots=1 into the hostfile, or fix its driver",
    ),
    "other GPUs": (
        {"a": {"devices": (GPU, GPU)}, "b": {"devices": (GPU, OLD_GPU)}, "c": {"devices": (GPU, GPU)}},
        f"? b, devices: {OLD_GPU}, {GPU}; a has {GPU}: the slowest sets the pace; put equal devices into one hostfile",
    ),
    "no ssh": (
        {"b": failure("ssh", "connect to host b port 22: Connection refused")},
        "! b, ssh: connect to host b port 22: Connection refused; start sshd on b, or name its port in ~/.ssh/config",
    ),
    "no key": ({"b": failure("ssh", "me@b: Permission denied (publickey).")}, "! b, ssh: me@b: Permission denied"),
    "silence": ({"b": failure("ssh", "no answer in 12 s")}, "! b, ssh: no answer in 12 s; is b up, its address right"),
    "no folder": (
        {"b": failure("folder", "sh: cd: can't cd to /project")},
        "! b, folder: sh: cd: can't cd to /project; put the project there: a shared file system, or rsync -a /project/",
    ),
    "no python": (
        {"b": failure("python", "missing")},
        "! b, python: missing; make the environment on b at the same pa",
    ),
    "no package": (
        {"b": failure("ddpm_ds", "No module named ddpm_ds.cluster")},
        "! b, ddpm_ds: No module named ddpm_ds.cluster; install this version there: /venv/bin/python -m pip install -e",
    ),
}


def test_equal_hosts_are_all_good() -> None:
    assert lines() == []
    assert check(survey()).keys() >= {"ssh", "spec", "JSON", "master port", *PACKAGES}


@pytest.mark.parametrize("case", CASES)
def test_the_line_names_host_value_and_fix(case: str) -> None:
    changes, expected = CASES[case]
    found = lines(**changes)
    assert len(found) == 1 and found[0].startswith(expected), found


def test_hosts_with_the_same_fault_share_a_line() -> None:
    found = lines(b={"environment": {}}, c={"environment": {}})
    assert [line[: line.index(":")] for line in found] == ["? b, c, environment"]


def test_folders_of_their_own_share_the_checkpoints() -> None:
    own = {"run_dir_shared": False, "disks": {"run": Disk(2 * GIB, True, False)}}
    room = {"disks": {"run": Disk(2 * GIB, True, False)}}
    assert lines(a=room, b=own, c=own) == []  # 4 GiB on three file systems
    shared = lines(a=room)
    assert len(shared) == 1 and "need 4.00 GiB" in shared[0]


def test_cells_of_a_host_that_can_not_be_asked_are_empty() -> None:
    rows = check(survey(b=failure("python", "missing")))
    assert [rows[name]["b"].text for name in ("ssh", "folder", "python")] == ["yes", "yes", "no"]
    assert all("b" not in rows[name] for name in ("ddpm_ds", "torch", "master port"))


@pytest.mark.parametrize("at", STEPS)
def test_a_host_that_tells_nothing_is_never_good(at: str) -> None:
    seen = survey(**{name: failure(at, "Bad configuration option: nonsense") for name in "abc"})
    found = findings(check(seen))
    assert all(any(line.startswith("! ") and name in line.split(":")[0] for line in found) for name in "abc"), found


def test_a_machine_that_does_not_answer_itself_is_not_good() -> None:
    alone = HostReport(slots=None, failure=_failure(Ended(None, "no answer in 60 s"), local=True))
    seen = Survey(replace(RUN, local=True), {"localhost": alone}, "", "")
    assert findings(check(seen))[0].startswith("! localhost, ddpm_ds: no answer in 60 s")

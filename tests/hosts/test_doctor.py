"""``ddpm-ds doctor`` on hosts that are alike, and on hosts that are not."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.hosts.hosts import Hosts
from tests.launching import REPOSITORY

pytestmark = pytest.mark.launch

DOCTOR = [sys.executable, "-m", "ddpm_ds.cli.main", "doctor"]
JSON = ["--deepspeed_config", "ds_configs/zero2_fp16.json"]
HOSTS = 3
SPEC = REPOSITORY / "launch" / "specs" / "digits.yaml"


def column(text: str, name: str) -> list[str]:
    """The cells of a column of the table, by host."""
    header, *rows = text.split("\n\n")[0].splitlines()
    begin = re.search(rf"  {re.escape(name)}(  |$)", header)
    assert begin is not None, text
    return [re.split("  +", line[begin.start() :].lstrip("! "))[0] for line in rows]


def test_equal_hosts_are_good_and_add_up(hosts: Hosts, tmp_path: Path) -> None:
    hostfile = hosts.hostfile(tmp_path / "hostfile")
    command = [*DOCTOR, "--hostfile", str(hostfile), *JSON]
    done = hosts[0].run(command, env={"MLFLOW_TRACKING_TOKEN": "hush"}, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "! " not in done.stdout and "hush" not in done.stdout
    assert column(done.stdout, "all-reduce") == ["gloo"] * HOSTS
    assert not hosts[1].processes(r"ddpm_ds\.cluster")


def test_what_differs_is_named_with_its_host_and_the_fix(hosts: Hosts, tmp_path: Path) -> None:
    one, two = hosts[0], hosts[1]
    here = metadata.version("pydantic")
    described = Path(str(metadata.distribution("pydantic").locate_file(f"pydantic-{here}.dist-info/METADATA")))
    two.replace_file(described, described.read_text().replace(f"\nVersion: {here}", "\nVersion: 2.11.0"))
    two.replace_file(SPEC, SPEC.read_text().replace("held_out_images: 197", "held_out_images: 64"))
    hostfile = hosts.hostfile(tmp_path / "hostfile", names=["worker-1", "worker-2", "10.77.0.9"])
    done = one.run([*DOCTOR, "--hostfile", str(hostfile), "--no-network"], timeout=120)
    assert done.returncode == 2, done.stdout
    assert f"! worker-2, version of pydantic: 2.11.0, others have {here}; install the same" in done.stdout
    assert f"! worker-2, {SPEC}: data.held_out_images: 64, others have 197; give all hosts" in done.stdout
    assert re.search(r"^! 10\.77\.0\.9, answers: .*(No route to host|timed out|no answer)", done.stdout, re.MULTILINE)

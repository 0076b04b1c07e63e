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


def row(text: str, name: str) -> list[str]:
    """The cells of a row of one of the tables."""
    (line,) = [line for line in text.splitlines() if re.match(rf"{re.escape(name)}  ", line)]
    return re.split(r"  +", line)[1:]


def test_equal_hosts_are_good_and_their_network_is_tried(hosts: Hosts, tmp_path: Path) -> None:
    hostfile = hosts.hostfile(tmp_path / "hostfile")
    done = hosts[0].run(
        [*DOCTOR, "--hostfile", str(hostfile), *JSON], env={"MLFLOW_TRACKING_TOKEN": "hush"}, timeout=120
    )
    assert done.returncode == 0, done.stdout
    assert "! " not in done.stdout
    assert row(done.stdout, "interface") == ["eth0 10.77.0.1", "eth0 10.77.0.2", "eth0 10.77.0.3"]
    assert row(done.stdout, "master port") == ["29500 free", "reached", "reached"]
    assert row(done.stdout, "run folder") == ["this one", "shared", "shared"]
    assert all(re.fullmatch(r"[\d.]+ ms", cell) for cell in row(done.stdout, "all-reduce"))
    assert "hush" not in done.stdout
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
    assert f"! worker-2, pydantic: 2.11.0, worker-1 has {here}; pip install pydantic=={here} on worker-2" in done.stdout
    assert f"! worker-2, spec: data.held_out_images is 64 (worker-1: 197); copy {SPEC} to worker-2" in done.stdout
    assert re.search(r"^! 10\.77\.0\.9, ssh: .*(No route to host|timed out|no answer)", done.stdout, re.MULTILINE)
    assert row(done.stdout, "torch")[0] == row(done.stdout, "torch")[1] and row(done.stdout, "torch")[2] == "-"

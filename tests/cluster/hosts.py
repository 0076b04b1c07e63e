"""What hosts would say that are all alike, to be changed where a test wants it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpm_ds.cluster.checks import Requirements
from ddpm_ds.cluster.facts import PACKAGES, Disk, Document, HostFacts
from ddpm_ds.cluster.survey import Failure, HostReport, Survey

GIB = 2**30
NEED = Requirements("/project", "/venv/bin/python", "digits.yaml", "zero2.json", 4 * GIB, {"OMP_NUM_THREADS": "4"})
FACTS = HostFacts(
    name="a",
    python="3.11.7",
    versions={**dict.fromkeys(PACKAGES, "2.13.1"), "ddpm_ds": "0.1.0"},
    commit="0123456789",
    sources={"ddpm_ds/cli/main.py": "aa", "ddpm_ds/errors.py": "bb"},
    spec=Document({"train.batch_images": "128", "name": '"digits"'}),
    ds_config=Document({"zero_optimization.stage": "2"}),
    disks={"run": Disk(100 * GIB, True, False), "data": Disk(100 * GIB, True, False)},
    images_missing="",
    cores=8,
    devices=(),
    environment={"OMP_NUM_THREADS": "4"},
    interfaces=("lo", "eth0"),
    addresses=("10.0.0.1",),
)


def survey(**changes: dict[str, Any]) -> Survey:
    """Hosts a, b and c, with changes by host: of facts, of the report, or ``failure`` alone."""
    hosts = {}
    for index, name in enumerate("abc"):
        report = HostReport(
            slots=2,
            facts=FACTS,
            run_dir_shared=None if name == "a" else True,
            interface="eth0",
            address=f"10.0.0.{index + 1}",
            keepalive_seconds=15,
        )
        change = changes.get(name, {})
        of_facts = {key: value for key, value in change.items() if key in HostFacts.__dataclass_fields__}
        of_report = {key: value for key, value in change.items() if key not in of_facts}
        hosts[name] = replace(report, facts=replace(FACTS, **of_facts), **of_report)
        if "failure" in change:
            hosts[name] = HostReport(slots=2, failure=change["failure"], keepalive_seconds=15)
    return Survey(hosts, "a", "10.0.0.1", 29500)


def failure(at: str, why: str) -> dict[str, Any]:
    """The change of a host that can't be asked."""
    return {"failure": Failure(at, why)}

"""What the hosts say, compared: a row for each thing that has to hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddpm_ds.doctor import fitness, reach, same
from ddpm_ds.doctor.cells import Row
from ddpm_ds.doctor.facts import Document
from ddpm_ds.doctor.survey import Survey


@dataclass(frozen=True)
class Need:
    """What a run asks of hosts."""

    folder: str
    """The working folder, the same on every host."""
    python: str
    spec: str
    ds_config: str | None
    checkpoints_bytes: int
    """Of all checkpoints that are kept and the one that is written meanwhile, on all hosts together."""
    travels: Mapping[str, str]
    """Variables of this machine that ask to travel."""


def check(survey: Survey, need: Need) -> list[Row]:
    """Every check of the hosts by themselves and side by side, without those of the network."""
    facts = survey.answering
    python = reach.step("python", survey, need.folder, need.python)
    by_ssh = any(report.keepalive_seconds is not None for report in survey.hosts.values())
    rows = [
        *([reach.step("ssh", survey, need.folder, need.python)] if by_ssh else []),
        reach.step("folder", survey, need.folder, need.python),
        Row("python", python.cells | same.python(facts).cells),
        reach.step(
            "ddpm_ds",
            survey,
            need.folder,
            need.python,
            lambda report: report.facts.versions["ddpm_ds"] if report.facts else "",
        ),
        same.sources(facts, need.folder),
        same.commit(facts),
        *same.packages(facts),
        same.document("spec", need.spec, {host: one.spec for host, one in facts.items()}),
        *([_ds_config(survey, need.ds_config)] if need.ds_config else []),
        fitness.images(facts),
        fitness.clock(survey),
        fitness.run_disk(facts, need.checkpoints_bytes, fitness.writers(survey)),
        fitness.data_disk(facts),
        fitness.run_folder(survey),
        fitness.devices(survey),
        same.environment(facts, need.travels),
        reach.keepalive(survey),
        reach.interface(survey),
        reach.port(survey),
    ]
    return [row for row in rows if row.cells]


def _ds_config(survey: Survey, path: str) -> Row:
    documents = {host: one.ds_config or Document() for host, one in survey.answering.items()}
    return same.document("JSON", path, documents)

"""Checks of what has to be the same on every host. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ddpm_ds.doctor.cells import Cell, Row, compared, differing, digest, listed, usual
from ddpm_ds.doctor.facts import PACKAGES, Document, Facts


def python(facts: Mapping[str, Facts]) -> Row:
    """Another minor version is bad, another patch release is to be known."""
    versions = {host: one.python for host, one in facts.items()}
    wanted = usual(versions)
    if wanted is None:
        return Row("python", {})
    cells = {}
    for host, version in versions.items():
        alike = version.split(".")[:2] == wanted.value.split(".")[:2]
        fix = f"make the environment on {host} with Python {wanted.value}"
        cells[host] = compared(version, wanted, fix, "warning" if alike else "bad")
    return Row("python", cells)


def packages(facts: Mapping[str, Facts]) -> list[Row]:
    """A row for each package."""
    rows = []
    for package in PACKAGES:
        installed = {host: one.versions[package] for host, one in facts.items() if package in one.versions}
        wanted = usual(installed)
        cells = {}
        for host in facts:
            if wanted is None:
                cells[host] = Cell("missing", "bad", "not installed", f"pip install {package} on {host}")
            else:
                fix = f"pip install {package}=={wanted.value} on {host}"
                cells[host] = compared(installed.get(host, "missing"), wanted, fix)
        rows.append(Row(package, cells))
    return rows


def sources(facts: Mapping[str, Facts], folder: str) -> Row:
    """The files of this package; of others the names are told."""
    digests = {host: digest(one.sources) for host, one in facts.items()}
    wanted = usual(digests)
    cells = {}
    for host, text in digests.items():
        cells[host] = Cell(text)
        if wanted is not None and text != wanted.value:
            names = differing(facts[host].sources, facts[wanted.host].sources)
            why = f"not the sources of {wanted.host}: {listed(names)}"
            fix = f"git checkout the same commit on {host}, or there: rsync -a {wanted.host}:{folder}/ {folder}/"
            cells[host] = Cell(text, "bad", why, fix)
    return Row("source", cells)


def commit(facts: Mapping[str, Facts]) -> Row:
    """Of clones; where the sources are the same it is only to be known."""
    commits = {host: one.commit for host, one in facts.items() if one.commit}
    wanted = usual(commits)
    if wanted is None:
        return Row("commit", {})
    name = wanted.value.rstrip("+")
    return Row(
        "commit",
        {host: compared(text, wanted, f"git checkout {name} on {host}", "warning") for host, text in commits.items()},
    )


def document(name: str, path: str, documents: Mapping[str, Document]) -> Row:
    """A file that each host reads for itself; of others the keys and values are told."""
    digests = {host: digest(one.values) for host, one in documents.items() if not one.error}
    wanted = usual(digests)
    cells = {}
    for host, one in documents.items():
        fix = f"copy {path} to {host}" + (f" from {wanted.host}" if wanted and wanted.host != host else "")
        if one.error:
            cells[host] = Cell("unreadable", "bad", one.error, fix)
        elif wanted is not None and digests[host] != wanted.value:
            ours = documents[wanted.host].values
            keys = differing(one.values, ours)
            why = [
                f"{key} is {one.values.get(key, 'missing')} ({wanted.host}: {ours.get(key, 'missing')})" for key in keys
            ]
            cells[host] = Cell(digests[host], "bad", listed(why), fix)
        else:
            cells[host] = Cell(digests[host])
    return Row(name, cells)


def environment(facts: Mapping[str, Facts], travels: Mapping[str, str]) -> Row:
    """Whether what is set on the launching machine is set there as well."""
    cells = {}
    for host, one in facts.items() if travels else ():
        missing = [name for name, value in travels.items() if one.environment.get(name) != value]
        cells[host] = Cell(f"{len(travels)} set")
        if missing:
            why = f"set here and not, or otherwise, there: {listed(missing)}"
            cells[host] = Cell(f"{len(missing)} missing", "warning", why, "let them travel: ddpm-ds doctor --write-env")
    return Row("environment", cells)

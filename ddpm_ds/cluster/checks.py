"""The cells of the doctor's table, and how hosts are compared. Pure.

Checks of what each host has: clock, disk, images, devices. Pure.

Checks of the way to a host and from it to the first one. Pure.

Checks of what has to be the same on every host. Pure.

What the hosts say, compared: a row for each thing that has to hold. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ddpm_ds.cluster.facts import PACKAGES, Document, HostFacts
from ddpm_ds.cluster.survey import Failure, HostReport, Survey
from ddpm_ds.command_line import GIB, gib

Level = Literal["good", "warning", "bad"]
LISTED = 3
DIGEST_DIGITS = 8


@dataclass(frozen=True)
class CheckResult:
    """One check of one host. Whatever is not good has a reason and a fix."""

    text: str
    level: Level = "good"
    why: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.level != "good" and not (self.why and self.fix):
            raise ValueError(f"{self} says no reason or no fix")


@dataclass(frozen=True)
class CheckRow:
    """One check of all hosts."""

    name: str
    cells: dict[str, CheckResult]
    """By host; one that could not be asked is left out."""


@dataclass(frozen=True)
class Usual:
    """What most hosts have, and the first host that has it."""

    value: str
    host: str


def usual(values: Mapping[str, str]) -> Usual | None:
    """The value of most hosts; of equally many the one that comes first. None where there is no host."""
    if not values:
        return None
    counts = Counter(values.values())
    value = max(counts, key=lambda one: counts[one])
    return Usual(value, next(host for host, one in values.items() if one == value))


def compared(text: str, wanted: Usual, fix: str, level: Level = "bad") -> CheckResult:
    """The cell of a host that has ``text`` where the others have ``wanted``."""
    if text == wanted.value:
        return CheckResult(text)
    return CheckResult(text, level, f"{text}, {wanted.host} has {wanted.value}", fix)


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Keys that have another value on the other side, or none."""
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def listed(names: Iterable[str]) -> str:
    """The first few, and how many more there are."""
    names = list(names)
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def digest(values: Mapping[str, str]) -> str:
    """A checksum of texts by their keys, to be looked at."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:DIGEST_DIGITS]


SKEW_SECONDS = 2.0
LEAST_FREE_BYTES = GIB


def clock(survey: Survey) -> CheckRow:
    """Against this machine's."""
    cells = {}
    for host in survey.answering:
        ahead = survey.hosts[host].clock_ahead_seconds
        text = f"{round(ahead, 2) + 0.0:+.2f} s"
        cells[host] = CheckResult(text)
        if abs(ahead) > SKEW_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            why = f"{abs(ahead):.1f} s {way} this machine: logs and dates of checkpoints would not compare"
            fix = f"let chrony or systemd-timesyncd set it: timedatectl set-ntp true on {host}"
            cells[host] = CheckResult(text, "bad", why, fix)
    return CheckRow("clock", cells)


def images(facts: Mapping[str, HostFacts]) -> CheckRow:
    """The spec's folder of images; no row where nothing is missing."""
    cells = {host: CheckResult("there") for host in facts if any(one.images_missing for one in facts.values())}
    for host, one in facts.items():
        if one.images_missing:
            why = f"there is no folder {one.images_missing}"
            cells[host] = CheckResult("missing", "bad", why, f"copy or mount the images on {host} at the same path")
    return CheckRow("images", cells)


def run_disk(facts: Mapping[str, HostFacts], needed: int, hosts_with_parts: int) -> CheckRow:
    """Room for the checkpoints that are kept, of ``needed`` bytes together, shared by so many file systems."""
    least = max(-(-needed // max(hosts_with_parts, 1)), LEAST_FREE_BYTES)
    return _disk("free for runs", "run", facts, least, "the checkpoints that are kept", "--run-dir")


def data_disk(facts: Mapping[str, HostFacts]) -> CheckRow:
    """Room for the prepared images, unless their folder is there already."""
    return _disk("free for data", "data", facts, LEAST_FREE_BYTES, "prepared images", "--set data.store_root=FOLDER")


def _disk(name: str, what: str, facts: Mapping[str, HostFacts], least: int, use: str, option: str) -> CheckRow:
    cells = {}
    for host, one in facts.items():
        if what not in one.disks:
            continue
        disk = one.disks[what]
        text = gib(disk.free_bytes)
        cells[host] = CheckResult(text)
        level: Level = "warning" if what == "data" and disk.exists else "bad"
        if not disk.writable:
            fix = f"give it to this user on {host} (chown), or choose another with {option}"
            cells[host] = CheckResult("not writable", level, "the folder can't be written", fix)
        elif disk.free_bytes < least:
            fix = f"make room on {host}, or choose another folder with {option}"
            cells[host] = CheckResult(text, level, f"{text} free, {use} ask for {gib(least)}", fix)
    return CheckRow(name, cells)


def run_folder(survey: Survey) -> CheckRow:
    """Shared or each host's own: both will do, and one has to know which; a mixture is a mistake."""
    seen = {host: survey.hosts[host].run_dir_shared for host in survey.answering}
    if all(answer is None for answer in seen.values()):
        return CheckRow("run folder", {})
    cells = {}
    for host, answer in seen.items():
        cells[host] = CheckResult("this one" if answer is None else "shared" if answer else "its own")
        if answer is False and any(seen.values()):
            why = "does not see the folder that the other hosts share"
            cells[host] = CheckResult("its own", "warning", why, f"mount it on {host} too, or give each host its own")
    return CheckRow("run folder", cells)


def writers(survey: Survey) -> int:
    """File systems that the checkpoints of a run are spread over."""
    return 1 + sum(report.run_dir_shared is False for report in survey.hosts.values())


def on_cuda(facts: Mapping[str, HostFacts]) -> bool:
    """Whether training would take CUDA devices: some host has one, and nothing says cpu."""
    cpu = any(one.environment.get("DS_ACCELERATOR") == "cpu" for one in facts.values())
    return not cpu and any(one.devices for one in facts.values())


def devices(survey: Survey) -> CheckRow:
    """CUDA devices against the hostfile's slots; on hosts without any CPU cores."""
    facts = survey.answering
    if not on_cuda(facts):
        return CheckRow("devices", {host: _cores(host, one, survey.hosts[host].slots) for host, one in facts.items()})
    kinds = usual({host: one.devices[0] for host, one in facts.items() if one.devices})
    cells = {}
    for host, one in facts.items():
        slots, count = survey.hosts[host].slots, len(one.devices)
        text = f"{count} x {one.devices[0]}" if count else "none"
        cells[host] = CheckResult(text)
        if count < (slots or 1):
            why = f"{count} CUDA devices for slots={slots or 1}"
            remedy = f"write slots={count} into the hostfile" if count else f"leave {host} out of the hostfile"
            cells[host] = CheckResult(text, "bad", why, f"{remedy}, or mend its driver (nvidia-smi tells)")
        elif kinds is not None and set(one.devices) != {kinds.value}:
            why = f"{', '.join(sorted(set(one.devices)))}; {kinds.host} has {kinds.value}: the slowest sets the pace"
            cells[host] = CheckResult(text, "warning", why, "put equal devices into one hostfile")
    return CheckRow("devices", cells)


def _cores(host: str, facts: HostFacts, slots: int | None) -> CheckResult:
    text = f"{facts.cores} CPU cores"
    if slots is None or slots <= facts.cores:
        return CheckResult(text)
    return CheckResult(
        text, "warning", f"slots={slots} on {text}", f"write {host} slots={facts.cores} into the hostfile"
    )


STEPS = ("ssh", "folder", "python", "ddpm_ds")
"""What a host has to have, one after the other, before it can be asked anything."""
OTHER_ADDRESS = "name an address of {} that all reach: --master-addr, deepspeed's --master_addr"


def step(
    at: str, survey: Survey, folder: str, python: str, text: Callable[[HostReport], str] = lambda _: "yes"
) -> CheckRow:
    """The row of one of ``STEPS``: what ``text`` says of a host that has taken them all."""
    cells = {}
    for host, report in survey.hosts.items():
        if report.failure is None:
            cells[host] = CheckResult(text(report))
        elif report.failure.at == at:
            cells[host] = CheckResult("no", "bad", report.failure.why, _fix(host, report.failure, folder, python))
        elif STEPS.index(at) < STEPS.index(report.failure.at):
            cells[host] = CheckResult("yes")
    return CheckRow(at, cells)


def _fix(host: str, failure: Failure, folder: str, python: str) -> str:
    others = {
        "folder": f"put the project there: a shared file system, or rsync -a {folder}/ {host}:{folder}/",
        "python": f"make the environment on {host} at the same path: {python}",
        "ddpm_ds": f"install this version there: {python} -m pip install -e {folder} on {host}",
    }
    if failure.at in others:
        return others[failure.at]
    for sign, fix in (
        ("Permission denied", f"let this user in by a key: ssh-copy-id {host}"),
        ("IDENTIFICATION HAS CHANGED", f"if its key was changed by right: ssh-keygen -R {host}, then ssh {host} true"),
        ("Host key verification", f"make its key known: ssh {host} true, and compare the fingerprint"),
        ("resolve", "correct the name in the hostfile, or add it to DNS, /etc/hosts or ~/.ssh/config"),
        ("refused", f"start sshd on {host}, or name its port in ~/.ssh/config"),
    ):
        if sign in failure.why:
            return fix
    return f"is {host} up, its address right and its port 22 open? ssh {host} true tells"


def interface(survey: Survey) -> CheckRow:
    """Interface and address towards the first host."""
    cells = {}
    for host, facts in survey.answering.items():
        report = survey.hosts[host]
        text = f"{report.interface or '?'} {report.address or '?'}"
        named = facts.environment.get("GLOO_SOCKET_IFNAME", "")
        leads_out = [name for name in facts.interfaces if name != "lo" or len(survey.hosts) == 1]
        unknown = [name for name in named.split(",") if name and facts.interfaces and name not in leads_out]
        cells[host] = CheckResult(text)
        if report.route_error:
            why = (
                f"no route to {survey.master} at {survey.master_address or 'an unknown address'}: {report.route_error}"
            )
            cells[host] = CheckResult("none", "bad", why, OTHER_ADDRESS.format(survey.master))
        elif _loops_back(survey, host):
            why = f"{survey.master_address} is a loopback address, which other hosts can't reach"
            cells[host] = CheckResult(text, "bad", why, OTHER_ADDRESS.format(survey.master))
        elif unknown:
            why = f"GLOO_SOCKET_IFNAME={named}, but what leads to other hosts is {', '.join(leads_out) or 'nothing'}"
            fix = "leave it out of the environment and of .deepspeed_env: each host then finds its own"
            cells[host] = CheckResult(text, "bad", why, fix)
    return CheckRow("interface", cells)


def _loops_back(survey: Survey, host: str) -> bool:
    """Whether a host finds itself where the first one should be."""
    return len(survey.hosts) > 1 and survey.hosts[host].address.startswith(("127.", "::1"))


def port(survey: Survey) -> CheckRow:
    """The master port: free on the first host, reached from the others."""
    cells: dict[str, CheckResult] = {}
    number, first = survey.master_port, survey.master
    for host in survey.answering:
        report = survey.hosts[host]
        if host == first and report.port_error:
            why = f"port {number} can't be had: {report.port_error}"
            fix = f"end what has it (ss -tlnp on {host}), or take another: --master-port, deepspeed's --master_port"
            cells[host] = CheckResult(f"{number} taken", "bad", why, fix)
        elif host == first:
            cells[host] = CheckResult(f"{number} free")
        elif first and report.port_error and not report.route_error and not _loops_back(survey, host):
            why = f"{first} at {survey.master_address}:{number}: {report.port_error}"
            fix = f"open TCP between the hosts in {first}'s firewall, or {OTHER_ADDRESS.format(first)}"
            cells[host] = CheckResult("not reached", "bad", why, fix)
        elif first and not survey.hosts[first].port_error and not report.port_error:
            cells[host] = CheckResult("reached")
    return CheckRow("master port", cells)


def keepalive(survey: Survey) -> CheckRow:
    """ServerAliveInterval of this machine's ssh."""
    cells = {}
    for host, report in survey.hosts.items():
        if report.keepalive_seconds:
            cells[host] = CheckResult(f"every {report.keepalive_seconds} s")
        elif report.keepalive_seconds is not None:
            why = "ssh asks for no sign of life, and waits for a host that is gone until TCP gives up"
            fix = "ServerAliveInterval 15 in ~/.ssh/config of this machine"
            cells[host] = CheckResult("off", "warning", why, fix)
    return CheckRow("ssh keepalive", cells)


def python(facts: Mapping[str, HostFacts]) -> CheckRow:
    """Another minor version is bad, another patch release is to be known."""
    versions = {host: one.python for host, one in facts.items()}
    wanted = usual(versions)
    if wanted is None:
        return CheckRow("python", {})
    cells = {}
    for host, version in versions.items():
        alike = version.split(".")[:2] == wanted.value.split(".")[:2]
        fix = f"make the environment on {host} with Python {wanted.value}"
        cells[host] = compared(version, wanted, fix, "warning" if alike else "bad")
    return CheckRow("python", cells)


def packages(facts: Mapping[str, HostFacts]) -> list[CheckRow]:
    """A row for each package."""
    rows = []
    for package in PACKAGES:
        installed = {host: one.versions[package] for host, one in facts.items() if package in one.versions}
        wanted = usual(installed)
        cells = {}
        for host in facts:
            if wanted is None:
                cells[host] = CheckResult("missing", "bad", "not installed", f"pip install {package} on {host}")
            else:
                fix = f"pip install {package}=={wanted.value} on {host}"
                cells[host] = compared(installed.get(host, "missing"), wanted, fix)
        rows.append(CheckRow(package, cells))
    return rows


def sources(facts: Mapping[str, HostFacts], folder: str) -> CheckRow:
    """The files of this package; of others the names are told."""
    digests = {host: digest(one.sources) for host, one in facts.items()}
    wanted = usual(digests)
    cells = {}
    for host, text in digests.items():
        cells[host] = CheckResult(text)
        if wanted is not None and text != wanted.value:
            names = differing(facts[host].sources, facts[wanted.host].sources)
            why = f"not the sources of {wanted.host}: {listed(names)}"
            fix = f"git checkout the same commit on {host}, or there: rsync -a {wanted.host}:{folder}/ {folder}/"
            cells[host] = CheckResult(text, "bad", why, fix)
    return CheckRow("source", cells)


def commit(facts: Mapping[str, HostFacts]) -> CheckRow:
    """Of clones; where the sources are the same it is only to be known."""
    commits = {host: one.commit for host, one in facts.items() if one.commit}
    wanted = usual(commits)
    if wanted is None:
        return CheckRow("commit", {})
    name = wanted.value.rstrip("+")
    return CheckRow(
        "commit",
        {host: compared(text, wanted, f"git checkout {name} on {host}", "warning") for host, text in commits.items()},
    )


def document(name: str, path: str, documents: Mapping[str, Document]) -> CheckRow:
    """A file that each host reads for itself; of others the keys and values are told."""
    digests = {host: digest(one.values) for host, one in documents.items() if not one.error}
    wanted = usual(digests)
    cells = {}
    for host, one in documents.items():
        fix = f"copy {path} to {host}" + (f" from {wanted.host}" if wanted and wanted.host != host else "")
        if one.error:
            cells[host] = CheckResult("unreadable", "bad", one.error, fix)
        elif wanted is not None and digests[host] != wanted.value:
            ours = documents[wanted.host].values
            keys = differing(one.values, ours)
            why = [
                f"{key} is {one.values.get(key, 'missing')} ({wanted.host}: {ours.get(key, 'missing')})" for key in keys
            ]
            cells[host] = CheckResult(digests[host], "bad", listed(why), fix)
        else:
            cells[host] = CheckResult(digests[host])
    return CheckRow(name, cells)


def environment(facts: Mapping[str, HostFacts], travels: Mapping[str, str]) -> CheckRow:
    """Whether what is set on the launching machine is set there as well."""
    cells = {}
    for host, one in facts.items() if travels else ():
        missing = [name for name, value in travels.items() if one.environment.get(name) != value]
        cells[host] = CheckResult(f"{len(travels)} set")
        if missing:
            why = f"set here and not, or otherwise, there: {listed(missing)}"
            cells[host] = CheckResult(
                f"{len(missing)} missing", "warning", why, "let them travel: ddpm-ds doctor --write-env"
            )
    return CheckRow("environment", cells)


@dataclass(frozen=True)
class Requirements:
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


def check(survey: Survey, need: Requirements) -> list[CheckRow]:
    """Every check of the hosts by themselves and side by side, without those of the network."""
    facts = survey.answering
    found = step("python", survey, need.folder, need.python)
    by_ssh = any(report.keepalive_seconds is not None for report in survey.hosts.values())
    rows = [
        *([step("ssh", survey, need.folder, need.python)] if by_ssh else []),
        step("folder", survey, need.folder, need.python),
        CheckRow("python", found.cells | python(facts).cells),
        step(
            "ddpm_ds",
            survey,
            need.folder,
            need.python,
            lambda report: report.facts.versions["ddpm_ds"] if report.facts else "",
        ),
        sources(facts, need.folder),
        commit(facts),
        *packages(facts),
        document("spec", need.spec, {host: one.spec for host, one in facts.items()}),
        *([_ds_config(survey, need.ds_config)] if need.ds_config else []),
        images(facts),
        clock(survey),
        run_disk(facts, need.checkpoints_bytes, writers(survey)),
        data_disk(facts),
        run_folder(survey),
        devices(survey),
        environment(facts, need.travels),
        keepalive(survey),
        interface(survey),
        port(survey),
    ]
    return [row for row in rows if row.cells]


def _ds_config(survey: Survey, path: str) -> CheckRow:
    documents = {host: one.ds_config or Document() for host, one in survey.answering.items()}
    return document("JSON", path, documents)

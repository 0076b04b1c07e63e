"""The checks of the preflight table: each compares what a host says with what the run needs or most hosts have. Pure.

``CHECKS`` is the table from top to bottom. A check takes a host, the survey and the planned run, and returns the cell
of that host, or None where the row says nothing about it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ddpm_ds.cluster.network import Network
from ddpm_ds.cluster.probe import PACKAGES, Disk, Document, HostFacts
from ddpm_ds.cluster.survey import Failure, PlannedRun, Survey
from ddpm_ds.command_line import GIB, gib

Level = Literal["good", "warning", "bad"]
LISTED = 3
"""Differences that are named."""
DIGEST_DIGITS = 8
SKEW_SECONDS = 2.0
LEAST_FREE_BYTES = GIB
STEPS = ("ssh", "folder", "python", "ddpm_ds")
"""The things that a host has to have, one after the other, before it can be asked anything."""
OTHER_ADDRESS = "name an address of {} that all reach: --master-addr, deepspeed's --master_addr"


@dataclass(frozen=True)
class CheckResult:
    """One check of one host. Whatever is not good has a reason and a fix."""

    text: str
    level: Level = "good"
    why: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.level != "good" and not (self.why and self.fix):
            raise ValueError(f"{self} has no reason or no fix")


@dataclass(frozen=True)
class CheckRow:
    """One check of all hosts."""

    name: str
    cells: dict[str, CheckResult]
    """Cells by host; one that could not be asked is left out."""


Check = Callable[[str, Survey, PlannedRun], CheckResult | None]


def check(survey: Survey, run: PlannedRun) -> list[CheckRow]:
    """Every check of the hosts, by themselves and side by side; those of the network are ``network_row``'s."""
    rows = []
    for name, judge in CHECKS.items():
        hosts = survey.hosts if name in ASKS_NOTHING else survey.facts
        cells = {host: judge(host, survey, run) for host in hosts}
        rows.append(CheckRow(name, {host: cell for host, cell in cells.items() if cell is not None}))
    return [row for row in rows if row.cells]


def on_cuda(facts: Mapping[str, HostFacts]) -> bool:
    """Whether training would take CUDA devices: some host has one, and nothing says cpu."""
    cpu = any(one.environment.get("DS_ACCELERATOR") == "cpu" for one in facts.values())
    return not cpu and any(one.devices for one in facts.values())


def network_row(network: Network) -> CheckRow:
    """The times of the all-reduce, and whatever has gone wrong in the network test."""
    cells = {host: CheckResult(f"{seconds * 1e3:.1f} ms") for host, seconds in network.all_reduce_seconds.items()}
    for host, why in network.errors.items():
        text = "failed later" if host in cells else "failed"
        cells[host] = CheckResult(text, "bad", f"{network.backend}: {why}", _network_fix(host, why, network.backend))
    return CheckRow("all-reduce", {host: cells[host] for host in network.hosts if host in cells})


def _network_fix(host: str, why: str, backend: str) -> str:
    why = why.lower()
    if why.startswith("ssh was lost"):
        return f"is {host} still up, and its network steady? then try again"
    if any(sign in why for sign in ("no module", "cannot import", "importerror")):
        return f"repair the environment on {host}: python -m ddpm_ds.cluster.network --help shows the error"
    if any(sign in why for sign in ("timeout", "timed out", "nothing heard", "connect")):
        return (
            f"open all TCP ports between the hosts (also those above 1024: {backend} takes free ones), or name the "
            f"interface that connects them: {backend.upper()}_SOCKET_IFNAME in .deepspeed_env"
        )
    return f"on {host} run with {'NCCL_DEBUG=INFO' if backend == 'nccl' else 'TORCH_DISTRIBUTED_DEBUG=INFO'} for more"


def _usual(values: Mapping[str, str]) -> tuple[str, str]:
    """The value that most hosts have, of equally many the one that comes first, and the first host that has it."""
    value = Counter(values.values()).most_common(1)[0][0]
    return value, next(host for host, one in values.items() if one == value)


def _same(host: str, values: Mapping[str, str], fix: str, level: Level = "bad") -> CheckResult:
    """A host's value against the usual one, which ``fix`` may name."""
    found, (usual, owner) = values.get(host, "missing"), _usual(values)
    if found == usual:
        return CheckResult(found)
    return CheckResult(found, level, f"{found}, {owner} has {usual}", fix.format(host=host, usual=usual))


def _listed(names: Iterable[str]) -> str:
    """The first few, and how many more there are."""
    names = list(names)
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def _digest(values: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:DIGEST_DIGITS]


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def _step(at: str, text: Callable[[HostFacts], str] = lambda _: "yes") -> Check:
    """The check of one of ``STEPS``; ``text`` is shown of a host that has taken them all."""

    def judge(host: str, survey: Survey, run: PlannedRun) -> CheckResult | None:
        failure, facts = survey.hosts[host].failure, survey.hosts[host].facts
        if failure is None:
            return CheckResult(text(facts) if facts else "yes")
        if failure.at == at:
            return CheckResult("no", "bad", failure.why, _step_fix(host, failure, run))
        return CheckResult("yes") if STEPS.index(at) < STEPS.index(failure.at) else None

    return judge


def _step_fix(host: str, failure: Failure, run: PlannedRun) -> str:
    if failure.at == "folder":
        return f"put the project there: a shared file system, or rsync -a {run.folder}/ {host}:{run.folder}/"
    if failure.at == "python":
        return f"make the environment on {host} at the same path: {run.python}"
    if failure.at == "ddpm_ds":
        return f"install this version there: {run.python} -m pip install -e {run.folder} on {host}"
    for sign, fix in (
        ("Permission denied", f"let this user in by a key: ssh-copy-id {host}"),
        ("IDENTIFICATION HAS CHANGED", f"if its key is new on purpose: ssh-keygen -R {host}, then ssh {host} true"),
        ("Host key verification", f"make its key known: ssh {host} true, and compare the fingerprint"),
        ("resolve", "correct the name in the hostfile, or add it to DNS, /etc/hosts or ~/.ssh/config"),
        ("refused", f"start sshd on {host}, or name its port in ~/.ssh/config"),
    ):
        if sign in failure.why:
            return fix
    return f"is {host} up, its address right and its port 22 open? try ssh {host} true"


def _ssh(host: str, survey: Survey, run: PlannedRun) -> CheckResult | None:
    by_ssh = any(report.keepalive_seconds is not None for report in survey.hosts.values())
    return _step("ssh")(host, survey, run) if by_ssh else None


def _python(host: str, survey: Survey, run: PlannedRun) -> CheckResult | None:
    """Another minor version is bad, another patch release only a warning."""
    versions = {host: one.python for host, one in survey.facts.items()}
    if host not in versions:
        return _step("python")(host, survey, run)
    minor = [version.split(".")[:2] for version in (versions[host], _usual(versions)[0])]
    fix = "make the environment on {host} with Python {usual}"
    return _same(host, versions, fix, "warning" if minor[0] == minor[1] else "bad")


def _sources(host: str, survey: Survey, run: PlannedRun) -> CheckResult:
    """The package's files; those that differ are named."""
    digests = {host: _digest(one.sources) for host, one in survey.facts.items()}
    usual, owner = _usual(digests)
    if digests[host] == usual:
        return CheckResult(usual)
    names = _differing(survey.facts[host].sources, survey.facts[owner].sources)
    why = f"not the sources of {owner}: {_listed(names)}"
    fix = f"git checkout the same commit on {host}, or there: rsync -a {owner}:{run.folder}/ {run.folder}/"
    return CheckResult(digests[host], "bad", why, fix)


def _commit(host: str, survey: Survey, run: PlannedRun) -> CheckResult | None:
    """The commits of clones; where the sources are the same a difference is only a warning."""
    commits = {host: one.commit for host, one in survey.facts.items() if one.commit}
    if host not in commits:
        return None
    return _same(host, commits, f"git checkout {_usual(commits)[0].rstrip('+')} on {host}", "warning")


def _package(package: str) -> Check:
    def judge(host: str, survey: Survey, run: PlannedRun) -> CheckResult:
        versions = {host: one.versions[package] for host, one in survey.facts.items() if package in one.versions}
        if not versions:
            return CheckResult("missing", "bad", "not installed", f"pip install {package} on {host}")
        return _same(host, versions, f"pip install {package}=={{usual}} on {{host}}")

    return judge


def _document(host: str, path: str, documents: Mapping[str, Document]) -> CheckResult:
    """A file that each host reads for itself; the keys that differ are named with both values."""
    one, digests = documents[host], {host: _digest(one.values) for host, one in documents.items() if not one.error}
    usual, owner = _usual(digests) if digests else ("", host)
    fix = f"copy {path} to {host}" + (f" from {owner}" if owner != host else "")
    if one.error:
        return CheckResult("unreadable", "bad", one.error, fix)
    if digests[host] == usual:
        return CheckResult(usual)
    theirs = documents[owner].values
    why = [
        f"{key} is {one.values.get(key, 'missing')} ({owner}: {theirs.get(key, 'missing')})"
        for key in _differing(one.values, theirs)
    ]
    return CheckResult(digests[host], "bad", _listed(why), fix)


def _spec(host: str, survey: Survey, run: PlannedRun) -> CheckResult:
    return _document(host, run.spec, {host: one.spec for host, one in survey.facts.items()})


def _ds_config(host: str, survey: Survey, run: PlannedRun) -> CheckResult | None:
    documents = {host: one.ds_config for host, one in survey.facts.items() if one.ds_config}
    return _document(host, run.ds_config, documents) if run.ds_config and host in documents else None


def _images(host: str, survey: Survey, run: PlannedRun) -> CheckResult | None:
    """The spec's folder of images; no row where nothing is missing."""
    if not any(one.images_missing for one in survey.facts.values()):
        return None
    missing = survey.facts[host].images_missing
    if not missing:
        return CheckResult("there")
    fix = f"copy or mount the images on {host} at the same path"
    return CheckResult("missing", "bad", f"there is no folder {missing}", fix)


def _clock(host: str, survey: Survey, run: PlannedRun) -> CheckResult:
    """The clock against this machine's."""
    ahead = survey.hosts[host].clock_ahead_seconds
    text = f"{round(ahead, 2) + 0.0:+.2f} s"
    if abs(ahead) <= SKEW_SECONDS:
        return CheckResult(text)
    way = "ahead of" if ahead > 0 else "behind"
    why = f"{abs(ahead):.1f} s {way} this machine: logs and dates of checkpoints would not compare"
    return CheckResult(text, "bad", why, f"let chrony or systemd-timesyncd set it: timedatectl set-ntp true on {host}")


def _run_disk(host: str, survey: Survey, run: PlannedRun) -> CheckResult:
    """Room for the checkpoints that are kept, over all file systems that they are spread over."""
    folders = 1 + sum(report.run_dir_shared is False for report in survey.hosts.values())
    least = max(-(-run.checkpoint_bytes // folders), LEAST_FREE_BYTES)
    return _disk(host, survey.facts[host].disks["run"], "bad", least, "the checkpoints that are kept", "--run-dir")


def _data_disk(host: str, survey: Survey, run: PlannedRun) -> CheckResult | None:
    """Room for the prepared images, unless their folder is there already."""
    disk = survey.facts[host].disks.get("data")
    if disk is None:
        return None
    level: Level = "warning" if disk.exists else "bad"
    return _disk(host, disk, level, LEAST_FREE_BYTES, "prepared images", "--set data.store_root=FOLDER")


def _disk(host: str, disk: Disk, level: Level, least: int, use: str, option: str) -> CheckResult:
    text = gib(disk.free_bytes)
    if not disk.writable:
        fix = f"give it to this user on {host} (chown), or choose another with {option}"
        return CheckResult("not writable", level, "the folder can't be written", fix)
    if disk.free_bytes < least:
        fix = f"make room on {host}, or choose another folder with {option}"
        return CheckResult(text, level, f"{text} free, {use} need {gib(least)}", fix)
    return CheckResult(text)


def _run_folder(host: str, survey: Survey, run: PlannedRun) -> CheckResult | None:
    """Shared or each host's own: both will do, but a mixture is a mistake."""
    seen = {host: survey.hosts[host].run_dir_shared for host in survey.facts}
    if all(shared is None for shared in seen.values()):
        return None
    if seen[host] is not False:
        return CheckResult("shared" if seen[host] else "this one")
    if not any(seen.values()):
        return CheckResult("its own")
    why = "does not see the folder that the other hosts share"
    return CheckResult("its own", "warning", why, f"mount it on {host} too, or give each host its own")


def _devices(host: str, survey: Survey, run: PlannedRun) -> CheckResult:
    """CUDA devices against the hostfile's slots; on hosts without any CPU cores."""
    one, slots = survey.facts[host], survey.hosts[host].slots
    if not on_cuda(survey.facts):
        text = f"{one.cores} CPU cores"
        if slots is None or slots <= one.cores:
            return CheckResult(text)
        fix = f"write {host} slots={one.cores} into the hostfile"
        return CheckResult(text, "warning", f"slots={slots} on {text}", fix)
    kind, owner = _usual({host: one.devices[0] for host, one in survey.facts.items() if one.devices})
    count = len(one.devices)
    text = f"{count} x {one.devices[0]}" if count else "none"
    if count < (slots or 1):
        remedy = f"write slots={count} into the hostfile" if count else f"leave {host} out of the hostfile"
        why = f"{count} CUDA devices for slots={slots or 1}"
        return CheckResult(text, "bad", why, f"{remedy}, or fix its driver (see nvidia-smi)")
    if set(one.devices) != {kind}:
        why = f"{', '.join(sorted(set(one.devices)))}; {owner} has {kind}: the slowest sets the pace"
        return CheckResult(text, "warning", why, "put equal devices into one hostfile")
    return CheckResult(text)


def _environment(host: str, survey: Survey, run: PlannedRun) -> CheckResult | None:
    """Whether the variables that are set on the launching machine are set there as well."""
    there = survey.facts[host].environment
    missing = [name for name, value in run.travels.items() if there.get(name) != value]
    if not missing:
        return CheckResult(f"{len(run.travels)} set") if run.travels else None
    why = f"set here, but missing or different there: {_listed(missing)}"
    return CheckResult(f"{len(missing)} missing", "warning", why, "let them travel: ddpm-ds doctor --write-env")


def _keepalive(host: str, survey: Survey, run: PlannedRun) -> CheckResult | None:
    """ServerAliveInterval of this machine's ssh."""
    seconds = survey.hosts[host].keepalive_seconds
    if seconds is None:
        return None
    if seconds:
        return CheckResult(f"every {seconds} s")
    why = "ssh never checks that a host is alive, and waits for one that is gone until TCP gives up"
    return CheckResult("off", "warning", why, "ServerAliveInterval 15 in ~/.ssh/config of this machine")


def _interface(host: str, survey: Survey, run: PlannedRun) -> CheckResult:
    """Interface and address towards the first host."""
    report, facts, first = survey.hosts[host], survey.facts[host], survey.master
    if report.route_error:
        why = f"no route to {first} at {survey.master_address or 'an unknown address'}: {report.route_error}"
        return CheckResult("none", "bad", why, OTHER_ADDRESS.format(first))
    text = f"{report.interface or '?'} {report.address or '?'}"
    if _loops_back(host, survey):
        why = f"{survey.master_address} is a loopback address, which other hosts can't reach"
        return CheckResult(text, "bad", why, OTHER_ADDRESS.format(first))
    named = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    usable = [name for name in facts.interfaces if name != "lo" or len(survey.hosts) == 1]
    if facts.interfaces and any(name not in usable for name in named.split(",") if name):
        why = f"GLOO_SOCKET_IFNAME={named}, but the interfaces to other hosts are {', '.join(usable) or 'none'}"
        fix = "leave it out of the environment and of .deepspeed_env: each host then finds its own"
        return CheckResult(text, "bad", why, fix)
    return CheckResult(text)


def _loops_back(host: str, survey: Survey) -> bool:
    """Whether a host finds itself where the first one should be."""
    return len(survey.hosts) > 1 and survey.hosts[host].address.startswith(("127.", "::1"))


def _port(host: str, survey: Survey, run: PlannedRun) -> CheckResult | None:
    """The master port: free on the first host, reached from the others."""
    number, first, report = survey.master_port, survey.master, survey.hosts[host]
    if not first:
        return None
    if host == first:
        if not report.port_error:
            return CheckResult(f"{number} free")
        fix = f"end its user (ss -tlnp on {host}), or take another port: --master-port, deepspeed's --master_port"
        return CheckResult(f"{number} taken", "bad", f"port {number} can't be used: {report.port_error}", fix)
    if not report.port_error:
        return None if survey.hosts[first].port_error else CheckResult("reached")
    if report.route_error or _loops_back(host, survey):  # which the row above explains
        return None
    why = f"{first} at {survey.master_address}:{number}: {report.port_error}"
    fix = f"open TCP between the hosts in {first}'s firewall, or {OTHER_ADDRESS.format(first)}"
    return CheckResult("not reached", "bad", why, fix)


ASKS_NOTHING = {*STEPS, "ssh keepalive"}
"""Checks of all hosts, also of those that can't be asked."""
CHECKS: dict[str, Check] = {
    "ssh": _ssh,
    "folder": _step("folder"),
    "python": _python,
    "ddpm_ds": _step("ddpm_ds", lambda facts: facts.versions["ddpm_ds"]),
    "source": _sources,
    "commit": _commit,
    **{package: _package(package) for package in PACKAGES},
    "spec": _spec,
    "JSON": _ds_config,
    "images": _images,
    "clock": _clock,
    "free for runs": _run_disk,
    "free for data": _data_disk,
    "run folder": _run_folder,
    "devices": _devices,
    "environment": _environment,
    "ssh keepalive": _keepalive,
    "interface": _interface,
    "master port": _port,
}

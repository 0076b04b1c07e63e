"""Checks of the preflight table: each compares a host with what the run needs, or with most other hosts. Pure.

``CHECKS`` is the table from top to bottom.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ddpm_ds.cluster.network import Network
from ddpm_ds.cluster.probe import PACKAGES, HostFacts
from ddpm_ds.cluster.survey import HostReport, PlannedRun, Survey
from ddpm_ds.command_line import GIB, gib

GOOD, WARNING, BAD = " ", "?", "!"
"""Marks of a cell: nothing to do, may be intended, must be fixed."""
LISTED = 3
"""Differences that are named."""
DIGEST_DIGITS = 8
SKEW_SECONDS = 2.0
LEAST_FREE_BYTES = GIB
STEPS = ("ssh", "folder", "python", "ddpm_ds")
"""Needed on a host, one after the other, before it can be asked anything."""
SSH_FIXES = {
    "Permission denied": "let this user in by a key: ssh-copy-id {host}",
    "IDENTIFICATION HAS CHANGED": "if its key is new on purpose: ssh-keygen -R {host}, then ssh {host} true",
    "Host key verification": "make its key known: ssh {host} true, and compare the fingerprint",
    "resolve": "correct the name in the hostfile, or add it to DNS, /etc/hosts or ~/.ssh/config",
    "refused": "start sshd on {host}, or name its port in ~/.ssh/config",
    "": "is {host} up, its address right and its port 22 open? try ssh {host} true",
}
"""Fixes by a part of ssh's message; the first that fits counts."""
STEP_FIXES = {
    "folder": "put the project there: a shared file system, or rsync -a {run.folder}/ {host}:{run.folder}/",
    "python": "make the environment on {host} at the same path: {run.python}",
    "ddpm_ds": "install this version there: {run.python} -m pip install -e {run.folder} on {host}",
}
NETWORK_FIXES = {
    ("ssh was lost",): "is {host} still up, and its network steady? then try again",
    ("no module", "cannot import", "importerror"): (
        "repair the environment on {host}: python -m ddpm_ds.cluster.network --help shows the error"
    ),
    ("timeout", "timed out", "nothing heard", "connect"): (
        "open all TCP ports between the hosts (also those above 1024: {backend} takes free ones), or name the "
        "interface that connects them: {BACKEND}_SOCKET_IFNAME in .deepspeed_env"
    ),
    ("",): "on {host} run with NCCL_DEBUG=INFO (nccl) or TORCH_DISTRIBUTED_DEBUG=INFO (gloo) for more",
}
"""Fixes by parts of the network test's error; the first that fits counts."""
OTHER_ADDRESS = "name an address of {} that all reach: --master-addr, deepspeed's --master_addr"

Value = TypeVar("Value")


@dataclass(frozen=True)
class CheckResult:
    """A cell: one check of one host. Whatever is not good has a reason and a fix."""

    text: str
    mark: str = GOOD
    why: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.mark != GOOD and not (self.why and self.fix):
            raise ValueError(f"{self} has no reason or no fix")


@dataclass(frozen=True)
class CheckRow:
    """One check of all hosts."""

    name: str
    cells: dict[str, CheckResult]
    """Cells by host; one that could not be asked is left out."""


@dataclass(frozen=True)
class Asked:
    """A host that is checked, among the others."""

    host: str
    survey: Survey
    run: PlannedRun

    @property
    def report(self) -> HostReport:
        """The findings about the host."""
        return self.survey.hosts[self.host]

    @property
    def facts(self) -> HostFacts:
        """The host's own answers; only for one that has answered."""
        return self.survey.facts[self.host]

    def each(self, value: Callable[[HostFacts], Value | None]) -> dict[str, Value]:
        """A value of each host that has one."""
        values = {host: value(facts) for host, facts in self.survey.facts.items()}
        return {host: found for host, found in values.items() if found is not None}

    def same(self, values: Mapping[str, str], fix: str, mark: str = BAD) -> CheckResult:
        """The host's value against the usual one, which ``fix`` may name."""
        found, (usual, owner) = values.get(self.host, "missing"), _usual(values)
        if found == usual:
            return CheckResult(found)
        fix = fix.format(host=self.host, usual=usual)
        return CheckResult(found, mark, f"{found}, {owner} has {usual}", fix)

    def same_mapping(
        self, mappings: Mapping[str, Mapping[str, str]], difference: str, reason: str, fix: str
    ) -> CheckResult:
        """The host's mapping against the usual one, both shown by a digest; the keys that differ are named."""
        texts = {host: json.dumps(mapping, sort_keys=True) for host, mapping in mappings.items()}
        digests = {host: hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS] for host, text in texts.items()}
        usual, owner = _usual(digests)
        if digests[self.host] == usual:
            return CheckResult(usual)
        ours, theirs = mappings[self.host], mappings[owner]
        differences = [
            difference.format(key=key, ours=ours.get(key, "missing"), theirs=theirs.get(key, "missing"), owner=owner)
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
        why = reason.format(owner=owner) + _listed(differences)
        return CheckResult(digests[self.host], BAD, why, fix.format(host=self.host, owner=owner, run=self.run))


Check = Callable[[Asked], CheckResult | None]
"""The cell of a host, or None where the row says nothing about it."""


def check(survey: Survey, run: PlannedRun) -> list[CheckRow]:
    """Every check of the hosts, by themselves and side by side; those of the network are ``network_row``'s."""
    rows = []
    for name, judge in CHECKS.items():
        hosts = survey.hosts if name in ASKS_NOTHING else survey.facts
        cells = {host: judge(Asked(host, survey, run)) for host in hosts}
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
        fix = next(fix for signs, fix in NETWORK_FIXES.items() if any(sign in why.lower() for sign in signs))
        fix = fix.format(host=host, backend=network.backend, BACKEND=network.backend.upper())
        cells[host] = CheckResult(text, BAD, f"{network.backend}: {why}", fix)
    return CheckRow("all-reduce", {host: cells[host] for host in network.hosts if host in cells})


def _usual(values: Mapping[str, str]) -> tuple[str, str]:
    """The value that most hosts have, of equally many the one that comes first, and the first host that has it."""
    value = Counter(values.values()).most_common(1)[0][0]
    return value, next(host for host, one in values.items() if one == value)


def _listed(names: list[str]) -> str:
    """The first few, and how many more there are."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def _step(step: str, asked: Asked) -> CheckResult | None:
    """The check of one of ``STEPS``: those before the one that failed are good, those after it are unknown."""
    failure = asked.report.failure
    if failure is None or STEPS.index(step) < STEPS.index(failure.at):
        return CheckResult("yes")
    if step != failure.at:
        return None
    fix = STEP_FIXES.get(step) or next(fix for sign, fix in SSH_FIXES.items() if sign in failure.why)
    return CheckResult("no", BAD, failure.why, fix.format(host=asked.host, run=asked.run))


def _ssh(asked: Asked) -> CheckResult | None:
    by_ssh = any(report.keepalive_seconds is not None for report in asked.survey.hosts.values())
    return _step("ssh", asked) if by_ssh else None


def _python(asked: Asked) -> CheckResult | None:
    """Another minor version is bad, another patch release only a warning."""
    versions = asked.each(lambda facts: facts.python)
    if asked.host not in versions:
        return _step("python", asked)
    ours, usual = (version.split(".")[:2] for version in (versions[asked.host], _usual(versions)[0]))
    return asked.same(versions, "make the environment on {host} with Python {usual}", WARNING if ours == usual else BAD)


def _ddpm_ds(asked: Asked) -> CheckResult | None:
    return CheckResult(asked.facts.versions["ddpm_ds"]) if asked.report.facts else _step("ddpm_ds", asked)


def _sources(asked: Asked) -> CheckResult:
    fix = "git checkout the same commit on {host}, or there: rsync -a {owner}:{run.folder}/ {run.folder}/"
    return asked.same_mapping(asked.each(lambda facts: facts.sources), "{key}", "not the sources of {owner}: ", fix)


def _commit(asked: Asked) -> CheckResult | None:
    """The commits of clones; where the sources are the same a difference is only a warning."""
    commits = asked.each(lambda facts: facts.commit or None)
    if asked.host not in commits:
        return None
    return asked.same(commits, f"git checkout {_usual(commits)[0].rstrip('+')} on {{host}}", WARNING)


def _package(package: str, asked: Asked) -> CheckResult:
    versions = asked.each(lambda facts: facts.versions.get(package))
    if not versions:
        return CheckResult("missing", BAD, "not installed", f"pip install {package} on {asked.host}")
    return asked.same(versions, f"pip install {package}=={{usual}} on {{host}}")


def _document(name: str, asked: Asked) -> CheckResult | None:
    """The spec or the DeepSpeed JSON, which each host reads for itself; keys that differ are named with both values."""
    documents = asked.each(lambda facts: getattr(facts, name))
    if asked.host not in documents:
        return None
    readable = {host: document.values for host, document in documents.items() if not document.error}
    if error := documents[asked.host].error:
        source = f" from {next(iter(readable))}" if readable else ""
        return CheckResult("unreadable", BAD, error, f"copy {getattr(asked.run, name)} to {asked.host}{source}")
    fix = f"copy {{run.{name}}} to {{host}} from {{owner}}"
    return asked.same_mapping(readable, "{key} is {ours} ({owner}: {theirs})", "", fix)


def _images(asked: Asked) -> CheckResult | None:
    """The spec's folder of images; no row where nothing is missing."""
    if not any(one.images_missing for one in asked.survey.facts.values()):
        return None
    missing = asked.facts.images_missing
    if not missing:
        return CheckResult("there")
    fix = f"copy or mount the images on {asked.host} at the same path"
    return CheckResult("missing", BAD, f"there is no folder {missing}", fix)


def _clock(asked: Asked) -> CheckResult:
    """The clock against this machine's."""
    ahead = asked.report.clock_ahead_seconds
    text = f"{round(ahead, 2) + 0.0:+.2f} s"
    if abs(ahead) <= SKEW_SECONDS:
        return CheckResult(text)
    way = "ahead of" if ahead > 0 else "behind"
    why = f"{abs(ahead):.1f} s {way} this machine: logs and dates of checkpoints would not compare"
    fix = f"let chrony or systemd-timesyncd set it: timedatectl set-ntp true on {asked.host}"
    return CheckResult(text, BAD, why, fix)


def _disk(name: str, asked: Asked) -> CheckResult | None:
    """Room for the checkpoints that are kept ("run"), over all file systems that they are spread over, or for the
    prepared images ("data"), unless their folder is there already."""
    disk = asked.facts.disks.get(name)
    if disk is None:
        return None
    mark, least, use, option = BAD, LEAST_FREE_BYTES, "prepared images", "--set data.store_root=FOLDER"
    if name == "run":
        folders = 1 + sum(report.run_dir_shared is False for report in asked.survey.hosts.values())
        least = max(-(-asked.run.checkpoint_bytes // folders), least)
        use, option = "the checkpoints that are kept", "--run-dir"
    elif disk.exists:
        mark = WARNING
    text = gib(disk.free_bytes)
    if not disk.writable:
        fix = f"give it to this user on {asked.host} (chown), or choose another with {option}"
        return CheckResult("not writable", mark, "the folder can't be written", fix)
    if disk.free_bytes < least:
        fix = f"make room on {asked.host}, or choose another folder with {option}"
        return CheckResult(text, mark, f"{text} free, {use} need {gib(least)}", fix)
    return CheckResult(text)


def _run_folder(asked: Asked) -> CheckResult | None:
    """Shared or each host's own: both will do, but a mixture is a mistake."""
    seen = [asked.survey.hosts[host].run_dir_shared for host in asked.survey.facts]
    shared = asked.report.run_dir_shared
    if all(one is None for one in seen):
        return None
    if shared is not False:
        return CheckResult("shared" if shared else "this one")
    if not any(seen):
        return CheckResult("its own")
    why = "does not see the folder that the other hosts share"
    return CheckResult("its own", WARNING, why, f"mount it on {asked.host} too, or give each host its own")


def _devices(asked: Asked) -> CheckResult:
    """CUDA devices against the hostfile's slots; on hosts without any CPU cores."""
    facts, slots = asked.facts, asked.report.slots or 1
    if not on_cuda(asked.survey.facts):
        text = f"{facts.cores} CPU cores"
        if slots <= facts.cores:
            return CheckResult(text)
        fix = f"write {asked.host} slots={facts.cores} into the hostfile"
        return CheckResult(text, WARNING, f"slots={slots} on {text}", fix)
    kind, owner = _usual(asked.each(lambda facts: facts.devices[0] if facts.devices else None))
    count = len(facts.devices)
    text = f"{count} x {facts.devices[0]}" if count else "none"
    if count < slots:
        remedy = f"write slots={count} into the hostfile" if count else f"leave {asked.host} out of the hostfile"
        fix = f"{remedy}, or fix its driver (see nvidia-smi)"
        return CheckResult(text, BAD, f"{count} CUDA devices for slots={slots}", fix)
    if set(facts.devices) != {kind}:
        why = f"{', '.join(sorted(set(facts.devices)))}; {owner} has {kind}: the slowest sets the pace"
        return CheckResult(text, WARNING, why, "put equal devices into one hostfile")
    return CheckResult(text)


def _environment(asked: Asked) -> CheckResult | None:
    """Whether the variables that are set on the launching machine are set there as well."""
    wanted, there = asked.run.travels, asked.facts.environment
    missing = [name for name, value in wanted.items() if there.get(name) != value]
    if not missing:
        return CheckResult(f"{len(wanted)} set") if wanted else None
    why = f"set here, but missing or different there: {_listed(missing)}"
    return CheckResult(f"{len(missing)} missing", WARNING, why, "let them travel: ddpm-ds doctor --write-env")


def _keepalive(asked: Asked) -> CheckResult | None:
    """ServerAliveInterval of this machine's ssh."""
    seconds = asked.report.keepalive_seconds
    if seconds is None:
        return None
    if seconds:
        return CheckResult(f"every {seconds} s")
    why = "ssh never checks that a host is alive, and waits for one that is gone until TCP gives up"
    return CheckResult("off", WARNING, why, "ServerAliveInterval 15 in ~/.ssh/config of this machine")


def _interface(asked: Asked) -> CheckResult:
    """Interface and address towards the first host."""
    report, first, address = asked.report, asked.survey.master, asked.survey.master_address
    if report.route_error:
        why = f"no route to {first} at {address or 'an unknown address'}: {report.route_error}"
        return CheckResult("none", BAD, why, OTHER_ADDRESS.format(first))
    text = f"{report.interface or '?'} {report.address or '?'}"
    if _loops_back(asked):
        why = f"{address} is a loopback address, which other hosts can't reach"
        return CheckResult(text, BAD, why, OTHER_ADDRESS.format(first))
    named, interfaces = asked.facts.environment.get("GLOO_SOCKET_IFNAME", ""), asked.facts.interfaces
    usable = [name for name in interfaces if name != "lo" or len(asked.survey.hosts) == 1]
    if interfaces and any(name not in usable for name in named.split(",") if name):
        why = f"GLOO_SOCKET_IFNAME={named}, but the interfaces to other hosts are {', '.join(usable) or 'none'}"
        fix = "leave it out of the environment and of .deepspeed_env: each host then finds its own"
        return CheckResult(text, BAD, why, fix)
    return CheckResult(text)


def _loops_back(asked: Asked) -> bool:
    """Whether a host finds itself where the first one should be."""
    return len(asked.survey.hosts) > 1 and asked.report.address.startswith(("127.", "::1"))


def _port(asked: Asked) -> CheckResult | None:
    """The master port: free on the first host, reached from the others."""
    number, first, error = asked.survey.master_port, asked.survey.master, asked.report.port_error
    if not first:
        return None
    if asked.host == first:
        if not error:
            return CheckResult(f"{number} free")
        fix = f"end its user (ss -tlnp on {first}), or take another port: --master-port, deepspeed's --master_port"
        return CheckResult(f"{number} taken", BAD, f"port {number} can't be used: {error}", fix)
    if not error:
        return None if asked.survey.hosts[first].port_error else CheckResult("reached")
    if asked.report.route_error or _loops_back(asked):  # which the row above explains
        return None
    fix = f"open TCP between the hosts in {first}'s firewall, or {OTHER_ADDRESS.format(first)}"
    return CheckResult("not reached", BAD, f"{first} at {asked.survey.master_address}:{number}: {error}", fix)


ASKS_NOTHING = {*STEPS, "ssh keepalive"}
"""Checks of all hosts, also of those that can't be asked."""
CHECKS: dict[str, Check] = {
    "ssh": _ssh,
    "folder": partial(_step, "folder"),
    "python": _python,
    "ddpm_ds": _ddpm_ds,
    "source": _sources,
    "commit": _commit,
    **{package: partial(_package, package) for package in PACKAGES},
    "spec": partial(_document, "spec"),
    "JSON": partial(_document, "ds_config"),
    "images": _images,
    "clock": _clock,
    "free for runs": partial(_disk, "run"),
    "free for data": partial(_disk, "data"),
    "run folder": _run_folder,
    "devices": _devices,
    "environment": _environment,
    "ssh keepalive": _keepalive,
    "interface": _interface,
    "master port": _port,
}

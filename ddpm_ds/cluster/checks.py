"""The preflight table: each row compares a host with what the run needs, or with most other hosts. Pure.

``CHECKS`` is the table from top to bottom.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ddpm_ds.cluster.probe import HostFacts
from ddpm_ds.cluster.survey import Network, Survey
from ddpm_ds.command_line import GIB, counted, gib
from ddpm_ds.processes.hosts import PACKAGES

GOOD, WARNING, BAD = " ", "?", "!"
"""Marks of a cell: nothing to do, may be intended, must be fixed."""
LISTED = 3
"""Maximum differences that a line names."""
DIGEST_DIGITS = 8
LEAST_FREE_BYTES = GIB
STEPS = ("ssh", "folder", "python", "ddpm_ds")
"""Needed on a host, one after the other, before it can be asked anything."""
STEP_FIXES = {
    "folder": "put the project there: a shared file system, or rsync -a {run.folder}/ {host}:{run.folder}/",
    "python": "make the environment on {host} at the same path: {run.python}",
    "ddpm_ds": "install this version there: {run.python} -m pip install -e {run.folder} on {host}",
}
SSH_FIXES = {
    "configuration option|keyword|argument": (
        "correct ~/.ssh/config, PDSH_SSH_ARGS or PDSH_SSH_ARGS_APPEND until this works: ssh {host} true"
    ),
    "Permission denied": "let this user in by a key: ssh-copy-id {host}",
    "IDENTIFICATION HAS CHANGED": "if its key is new on purpose: ssh-keygen -R {host}, then ssh {host} true",
    "Host key verification": "make its key known: ssh {host} true, and compare the fingerprint",
    "resolve": "correct the name in the hostfile, or add it to DNS, /etc/hosts or ~/.ssh/config",
    "refused": "start sshd on {host}, or name its port in ~/.ssh/config",
    "": "is {host} up, its address right and its port 22 open? try ssh {host} true",
}
"""Fixes by a pattern in ssh's message; the first that fits counts."""
NETWORK_FIXES = {
    "ssh was lost": "is {host} still up, and its network steady? then try again",
    "no module|cannot import|importerror": (
        "repair the environment on {host}: python -c 'import torch, ddpm_ds' shows the error"
    ),
    "timeout|timed out|nothing heard|connect": (
        "open all TCP ports between the hosts (also those above 1024: {backend} takes free ones), or name the "
        "interface that connects them: {BACKEND}_SOCKET_IFNAME in .deepspeed_env"
    ),
    "": "on {host} run with NCCL_DEBUG=INFO (nccl) or TORCH_DISTRIBUTED_DEBUG=INFO (gloo) for more",
}
"""Fixes by a pattern in the network test's error; the first that fits counts."""
OTHER_ADDRESS = "name an address of {} that all reach: --master-addr, deepspeed's --master_addr"


@dataclass(frozen=True)
class Cell:
    """Result of one check of one host, with a reason and a fix unless it is good."""

    text: str
    mark: str = GOOD
    why: str = ""
    fix: str = ""


Rows = dict[str, dict[str, Cell]]
"""Cells by check and host; a host that could not be asked is left out."""


def check(survey: Survey) -> Rows:
    """Return the cells of all checks except that of the network, which :func:`network_row` returns."""
    rows: Rows = {}
    for name, judge in CHECKS.items():
        hosts = survey.hosts if name in STEPS else survey.facts
        found = {host: judge(survey, host) for host in hosts}
        if cells := {host: cell for host, cell in found.items() if cell is not None}:
            rows[name] = cells
    return rows


def on_cuda(facts: Mapping[str, HostFacts]) -> bool:
    """Return whether training would use CUDA devices: a host has one, and none sets DS_ACCELERATOR to cpu."""
    cpu = any(one.environment.get("DS_ACCELERATOR") == "cpu" for one in facts.values())
    return not cpu and any(one.devices for one in facts.values())


def network_row(network: Network) -> dict[str, Cell]:
    """Return the time of the all-reduce on each host, or its error in the network test."""
    cells = {host: Cell(f"{seconds * 1e3:.1f} ms") for host, seconds in network.all_reduce_seconds.items()}
    for host, why in network.errors.items():
        text = "failed later" if host in cells else "failed"
        fix = _first_fix(NETWORK_FIXES, why)
        fix = fix.format(host=host, backend=network.backend, BACKEND=network.backend.upper())
        cells[host] = Cell(text, BAD, f"{network.backend}: {why}", fix)
    return cells


def _first_fix(fixes: Mapping[str, str], why: str) -> str:
    return next(fix for pattern, fix in fixes.items() if re.search(pattern, why, re.IGNORECASE))


def _usual(values: Mapping[str, str]) -> tuple[str, str]:
    """Return the value that most hosts have, in a tie the first such value, and the first host that has it."""
    value = Counter(values.values()).most_common(1)[0][0]
    return value, next(host for host, one in values.items() if one == value)


def _same(values: Mapping[str, str], host: str, fix: str, mark: str = BAD) -> Cell:
    """Compare the host's value with the usual one, which ``fix`` may name as ``{usual}``."""
    found, (usual, owner) = values.get(host, "missing"), _usual(values)
    if found == usual:
        return Cell(found)
    return Cell(found, mark, f"{found}, {owner} has {usual}", fix.format(usual=usual))


def _differing(mappings: Mapping[str, Mapping[str, str]], host: str) -> tuple[str, str, list[str]]:
    """Return a digest of the host's mapping, the first host with the usual one, and the keys in which they differ."""
    texts = {name: json.dumps(mapping, sort_keys=True) for name, mapping in mappings.items()}
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS] for name, text in texts.items()}
    _, owner = _usual(digests)
    ours, theirs = mappings[host], mappings[owner]
    return digests[host], owner, [key for key in sorted(ours.keys() | theirs) if ours.get(key) != theirs.get(key)]


def _listed(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def _step(step: str, survey: Survey, host: str) -> Cell | None:
    """Check one of ``STEPS``: those before the one that failed are good, those after it are unknown."""
    failure = survey.hosts[host].failure
    if step == "ssh" and survey.run.local:
        return None
    if failure is None or STEPS.index(step) < STEPS.index(failure.at):
        return Cell("yes")
    if step != failure.at:
        return None
    fix = STEP_FIXES.get(step) or _first_fix(SSH_FIXES, failure.why)
    return Cell("no", BAD, failure.why, fix.format(host=host, run=survey.run))


def _python(survey: Survey, host: str) -> Cell | None:
    """Compare versions of Python; another minor version is bad, another patch release only a warning."""
    if host not in survey.facts:
        return _step("python", survey, host)
    versions = {name: facts.python for name, facts in survey.facts.items()}
    ours, usual = (version.split(".")[:2] for version in (versions[host], _usual(versions)[0]))
    fix = f"make the environment on {host} with Python {{usual}}"
    return _same(versions, host, fix, WARNING if ours == usual else BAD)


def _ddpm_ds(survey: Survey, host: str) -> Cell | None:
    facts = survey.hosts[host].facts
    return Cell(facts.versions["ddpm_ds"]) if facts else _step("ddpm_ds", survey, host)


def _sources(survey: Survey, host: str) -> Cell:
    digest, owner, files = _differing({name: facts.sources for name, facts in survey.facts.items()}, host)
    if not files:
        return Cell(digest)
    folder = survey.run.folder
    fix = f"git checkout the same commit on {host}, or there: rsync -a {owner}:{folder}/ {folder}/"
    return Cell(digest, BAD, f"not the sources of {owner}: {_listed(files)}", fix)


def _package(package: str, survey: Survey, host: str) -> Cell:
    versions = {name: facts.versions[package] for name, facts in survey.facts.items() if package in facts.versions}
    if not versions:
        return Cell("missing", BAD, "not installed", f"pip install {package} on {host}")
    return _same(versions, host, f"pip install {package}=={{usual}} on {host}")


def _document(name: str, survey: Survey, host: str) -> Cell | None:
    """Compare the run specs or DeepSpeed JSONs that hosts have read; keys that differ are named with both values."""
    path = getattr(survey.run, name)
    if path is None:
        return None
    documents = {other: getattr(facts, name) for other, facts in survey.facts.items()}
    readable = {other: document.values for other, document in documents.items() if not document.error}
    if error := documents[host].error:
        source = f" from {next(iter(readable))}" if readable else ""
        return Cell("unreadable", BAD, error, f"copy {path} to {host}{source}")
    digest, owner, keys = _differing(readable, host)
    if not keys:
        return Cell(digest)
    ours, theirs = readable[host], readable[owner]
    named = [f"{key} is {ours.get(key, 'missing')} ({owner}: {theirs.get(key, 'missing')})" for key in keys]
    return Cell(digest, BAD, _listed(named), f"copy {path} to {host} from {owner}")


def _images(survey: Survey, host: str) -> Cell | None:
    """Check that ``data.path`` exists; no row if it does on every host."""
    if not any(facts.images_missing for facts in survey.facts.values()):
        return None
    missing = survey.facts[host].images_missing
    if not missing:
        return Cell("there")
    fix = f"copy or mount the images on {host} at the same path"
    return Cell("missing", BAD, f"data.path = {missing} does not exist", fix)


def _disk(name: str, survey: Survey, host: str) -> Cell | None:
    """Check the space for the run's share of checkpoints ("run") or for prepared images ("data").

    Hosts that each have a folder of runs of their own share the checkpoints. Too little space for images is only a
    warning if their folder already exists.
    """
    disk = survey.facts[host].disks.get(name)
    if disk is None:
        return None
    mark, least, use, option = BAD, LEAST_FREE_BYTES, "prepared images", "--set data.store_root=FOLDER"
    if name == "run":
        folders = 1 + sum(report.run_dir_shared is False for report in survey.hosts.values())
        least = max(-(-survey.run.checkpoint_bytes // folders), least)
        use, option = "the checkpoints that are kept", "--run-dir"
    elif disk.exists:
        mark = WARNING
    text = gib(disk.free_bytes)
    if not disk.writable:
        fix = f"give it to this user on {host} (chown), or choose another with {option}"
        return Cell("not writable", mark, "the folder can't be written", fix)
    if disk.free_bytes < least:
        fix = f"make room on {host}, or choose another folder with {option}"
        return Cell(text, mark, f"{text} free, {use} need {gib(least)}", fix)
    return Cell(text)


def _run_folder(survey: Survey, host: str) -> Cell | None:
    """Compare which hosts share the folder of runs; all or none will do, but a mixture is a mistake."""
    seen = [survey.hosts[other].run_dir_shared for other in survey.facts]
    shared = survey.hosts[host].run_dir_shared
    if all(one is None for one in seen):
        return None
    if shared is not False:
        return Cell("shared" if shared else "this one")
    if not any(seen):
        return Cell("its own")
    why = "does not see the folder that the other hosts share"
    return Cell("its own", WARNING, why, f"mount it on {host} too, or give each host its own")


def _devices(survey: Survey, host: str) -> Cell:
    """Compare CUDA devices, or CPU cores if training uses none, with the hostfile's slots."""
    facts, slots = survey.facts[host], survey.hosts[host].slots or 1
    if not on_cuda(survey.facts):
        text = counted(facts.cores, "CPU core")
        if slots <= facts.cores:
            return Cell(text)
        return Cell(text, WARNING, f"slots={slots} on {text}", f"write {host} slots={facts.cores} into the hostfile")
    kind, owner = _usual({other: one.devices[0] for other, one in survey.facts.items() if one.devices})
    count = len(facts.devices)
    text = f"{count} x {facts.devices[0]}" if count else "none"
    if count < slots:
        remedy = f"write slots={count} into the hostfile" if count else f"leave {host} out of the hostfile"
        fix = f"{remedy}, or fix its driver (see nvidia-smi)"
        return Cell(text, BAD, f"{counted(count, 'CUDA device')} for slots={slots}", fix)
    if set(facts.devices) != {kind}:
        why = f"{', '.join(sorted(set(facts.devices)))}; {owner} has {kind}: the slowest sets the pace"
        return Cell(text, WARNING, why, "put equal devices into one hostfile")
    return Cell(text)


def _environment(survey: Survey, host: str) -> Cell | None:
    """Check that the variables that are set on this machine are set there as well."""
    wanted, there = survey.run.travels, survey.facts[host].environment
    missing = [name for name, value in wanted.items() if there.get(name) != value]
    if not missing:
        return Cell(f"{len(wanted)} set") if wanted else None
    why = f"set here, but missing or different there: {_listed(missing)}"
    return Cell(f"{len(missing)} missing", WARNING, why, "write them into .deepspeed_env, a line NAME=VALUE for each")


def _interface(survey: Survey, host: str) -> Cell:
    """Check interface and address towards the first host."""
    report, first, address = survey.hosts[host], survey.master, survey.master_address
    if report.route_error:
        why = f"no route to {first} at {address or 'an unknown address'}: {report.route_error}"
        return Cell("none", BAD, why, OTHER_ADDRESS.format(first))
    text = f"{report.interface or '?'} {report.address or '?'}"
    if _loops_back(survey, host):
        why = f"{address} is a loopback address, which other hosts can't reach"
        return Cell(text, BAD, why, OTHER_ADDRESS.format(first))
    facts = survey.facts[host]
    named = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    usable = [name for name in facts.interfaces if name != "lo" or len(survey.hosts) == 1]
    if any(name not in usable for name in named.split(",") if name):
        why = f"GLOO_SOCKET_IFNAME={named}, but the interfaces to other hosts are {', '.join(usable) or 'none'}"
        return Cell(
            text, BAD, why, "leave it out of the environment and of .deepspeed_env: each host then finds its own"
        )
    return Cell(text)


def _loops_back(survey: Survey, host: str) -> bool:
    """Return whether the first host's address leads a host to itself."""
    return len(survey.hosts) > 1 and survey.hosts[host].address.startswith(("127.", "::1"))


def _port(survey: Survey, host: str) -> Cell | None:
    """Check that the master port is free on the first host and reached from the others."""
    number, first, error = survey.run.master_port, survey.master, survey.hosts[host].port_error
    if not first:
        return None
    if host == first:
        if not error:
            return Cell(f"{number} free")
        fix = f"end its user (ss -tlnp on {first}), or take another port: --master-port, run's --port"
        return Cell(f"{number} taken", BAD, f"port {number} can't be used: {error}", fix)
    if not error:
        return None if survey.hosts[first].port_error else Cell("reached")
    if survey.hosts[host].route_error or _loops_back(survey, host):  # which the row above explains
        return None
    fix = f"open TCP between the hosts in {first}'s firewall, or {OTHER_ADDRESS.format(first)}"
    return Cell("not reached", BAD, f"{first} at {survey.master_address}:{number}: {error}", fix)


CHECKS: dict[str, Callable[[Survey, str], Cell | None]] = {
    "ssh": partial(_step, "ssh"),
    "folder": partial(_step, "folder"),
    "python": _python,
    "ddpm_ds": _ddpm_ds,
    "source": _sources,
    **{package: partial(_package, package) for package in PACKAGES},
    "spec": partial(_document, "spec"),
    "JSON": partial(_document, "ds_config"),
    "images": _images,
    "free for runs": partial(_disk, "run"),
    "free for data": partial(_disk, "data"),
    "run folder": _run_folder,
    "devices": _devices,
    "environment": _environment,
    "interface": _interface,
    "master port": _port,
}

"""Checks of what each host has: clock, disk, images, devices. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ddpm_ds.doctor.cells import Cell, Level, Row, usual
from ddpm_ds.doctor.facts import Facts
from ddpm_ds.doctor.survey import Survey
from ddpm_ds.planner.units import GIB, gib

SKEW_SECONDS = 2.0
LEAST_FREE_BYTES = GIB


def clock(survey: Survey) -> Row:
    """Against this machine's."""
    cells = {}
    for host in survey.answering:
        ahead = survey.hosts[host].clock_ahead_seconds
        text = f"{round(ahead, 2) + 0.0:+.2f} s"
        cells[host] = Cell(text)
        if abs(ahead) > SKEW_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            why = f"{abs(ahead):.1f} s {way} this machine: logs and dates of checkpoints would not compare"
            fix = f"let chrony or systemd-timesyncd set it: timedatectl set-ntp true on {host}"
            cells[host] = Cell(text, "bad", why, fix)
    return Row("clock", cells)


def images(facts: Mapping[str, Facts]) -> Row:
    """The spec's folder of images; no row where nothing is missing."""
    cells = {host: Cell("there") for host in facts if any(one.images_missing for one in facts.values())}
    for host, one in facts.items():
        if one.images_missing:
            why = f"there is no folder {one.images_missing}"
            cells[host] = Cell("missing", "bad", why, f"copy or mount the images on {host} at the same path")
    return Row("images", cells)


def run_disk(facts: Mapping[str, Facts], needed: int, hosts_with_parts: int) -> Row:
    """Room for the checkpoints that are kept, of ``needed`` bytes together, shared by so many file systems."""
    least = max(-(-needed // max(hosts_with_parts, 1)), LEAST_FREE_BYTES)
    return _disk("free for runs", "run", facts, least, "the checkpoints that are kept", "--run-dir")


def data_disk(facts: Mapping[str, Facts]) -> Row:
    """Room for the prepared images, unless their folder is there already."""
    return _disk("free for data", "data", facts, LEAST_FREE_BYTES, "prepared images", "--set data.store_root=FOLDER")


def _disk(name: str, what: str, facts: Mapping[str, Facts], least: int, use: str, option: str) -> Row:
    cells = {}
    for host, one in facts.items():
        if what not in one.disks:
            continue
        disk = one.disks[what]
        text = gib(disk.free_bytes)
        cells[host] = Cell(text)
        level: Level = "warning" if what == "data" and disk.exists else "bad"
        if not disk.writable:
            fix = f"give it to this user on {host} (chown), or choose another with {option}"
            cells[host] = Cell("not writable", level, "the folder can't be written", fix)
        elif disk.free_bytes < least:
            fix = f"make room on {host}, or choose another folder with {option}"
            cells[host] = Cell(text, level, f"{text} free, {use} ask for {gib(least)}", fix)
    return Row(name, cells)


def run_folder(survey: Survey) -> Row:
    """Shared or each host's own: both will do, and one has to know which; a mixture is a mistake."""
    seen = {host: survey.hosts[host].run_dir_shared for host in survey.answering}
    if all(answer is None for answer in seen.values()):
        return Row("run folder", {})
    cells = {}
    for host, answer in seen.items():
        cells[host] = Cell("this one" if answer is None else "shared" if answer else "its own")
        if answer is False and any(seen.values()):
            why = "does not see the folder that the other hosts share"
            cells[host] = Cell("its own", "warning", why, f"mount it on {host} too, or give each host its own")
    return Row("run folder", cells)


def writers(survey: Survey) -> int:
    """File systems that the checkpoints of a run are spread over."""
    return 1 + sum(report.run_dir_shared is False for report in survey.hosts.values())


def on_cuda(facts: Mapping[str, Facts]) -> bool:
    """Whether training would take CUDA devices: some host has one, and nothing says cpu."""
    cpu = any(one.environment.get("DS_ACCELERATOR") == "cpu" for one in facts.values())
    return not cpu and any(one.devices for one in facts.values())


def devices(survey: Survey) -> Row:
    """CUDA devices against the hostfile's slots; on hosts without any CPU cores."""
    facts = survey.answering
    if not on_cuda(facts):
        return Row("devices", {host: _cores(host, one, survey.hosts[host].slots) for host, one in facts.items()})
    kinds = usual({host: one.devices[0] for host, one in facts.items() if one.devices})
    cells = {}
    for host, one in facts.items():
        slots, count = survey.hosts[host].slots, len(one.devices)
        text = f"{count} x {one.devices[0]}" if count else "none"
        cells[host] = Cell(text)
        if count < (slots or 1):
            why = f"{count} CUDA devices for slots={slots or 1}"
            remedy = f"write slots={count} into the hostfile" if count else f"leave {host} out of the hostfile"
            cells[host] = Cell(text, "bad", why, f"{remedy}, or mend its driver (nvidia-smi tells)")
        elif kinds is not None and set(one.devices) != {kinds.value}:
            why = f"{', '.join(sorted(set(one.devices)))}; {kinds.host} has {kinds.value}: the slowest sets the pace"
            cells[host] = Cell(text, "warning", why, "put equal devices into one hostfile")
    return Row("devices", cells)


def _cores(host: str, facts: Facts, slots: int | None) -> Cell:
    text = f"{facts.cores} CPU cores"
    if slots is None or slots <= facts.cores:
        return Cell(text)
    return Cell(text, "warning", f"slots={slots} on {text}", f"write {host} slots={facts.cores} into the hostfile")

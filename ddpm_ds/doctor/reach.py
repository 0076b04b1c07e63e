"""Checks of the way to a host and from it to the first one. Pure."""

from __future__ import annotations

from collections.abc import Callable

from ddpm_ds.doctor.cells import Cell, Row
from ddpm_ds.doctor.survey import Failure, HostReport, Survey

STEPS = ("ssh", "folder", "python", "ddpm_ds")
"""What a host has to have, one after the other, before it can be asked anything."""
OTHER_ADDRESS = "name an address of {} that all reach: --master-addr, deepspeed's --master_addr"


def step(at: str, survey: Survey, folder: str, python: str, text: Callable[[HostReport], str] = lambda _: "yes") -> Row:
    """The row of one of ``STEPS``: what ``text`` says of a host that has taken them all."""
    cells = {}
    for host, report in survey.hosts.items():
        if report.failure is None:
            cells[host] = Cell(text(report))
        elif report.failure.at == at:
            cells[host] = Cell("no", "bad", report.failure.why, _fix(host, report.failure, folder, python))
        elif STEPS.index(at) < STEPS.index(report.failure.at):
            cells[host] = Cell("yes")
    return Row(at, cells)


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


def interface(survey: Survey) -> Row:
    """Interface and address towards the first host."""
    cells = {}
    for host, facts in survey.answering.items():
        report = survey.hosts[host]
        text = f"{report.interface or '?'} {report.address or '?'}"
        named = facts.environment.get("GLOO_SOCKET_IFNAME", "")
        leads_out = [name for name in facts.interfaces if name != "lo" or len(survey.hosts) == 1]
        unknown = [name for name in named.split(",") if name and facts.interfaces and name not in leads_out]
        cells[host] = Cell(text)
        if report.route_error:
            why = (
                f"no route to {survey.master} at {survey.master_address or 'an unknown address'}: {report.route_error}"
            )
            cells[host] = Cell("none", "bad", why, OTHER_ADDRESS.format(survey.master))
        elif _loops_back(survey, host):
            why = f"{survey.master_address} is a loopback address, which other hosts can't reach"
            cells[host] = Cell(text, "bad", why, OTHER_ADDRESS.format(survey.master))
        elif unknown:
            why = f"GLOO_SOCKET_IFNAME={named}, but what leads to other hosts is {', '.join(leads_out) or 'nothing'}"
            fix = "leave it out of the environment and of .deepspeed_env: each host then finds its own"
            cells[host] = Cell(text, "bad", why, fix)
    return Row("interface", cells)


def _loops_back(survey: Survey, host: str) -> bool:
    """Whether a host finds itself where the first one should be."""
    return len(survey.hosts) > 1 and survey.hosts[host].address.startswith(("127.", "::1"))


def port(survey: Survey) -> Row:
    """The master port: free on the first host, reached from the others."""
    cells: dict[str, Cell] = {}
    number, first = survey.master_port, survey.master
    for host in survey.answering:
        report = survey.hosts[host]
        if host == first and report.port_error:
            why = f"port {number} can't be had: {report.port_error}"
            fix = f"end what has it (ss -tlnp on {host}), or take another: --master-port, deepspeed's --master_port"
            cells[host] = Cell(f"{number} taken", "bad", why, fix)
        elif host == first:
            cells[host] = Cell(f"{number} free")
        elif first and report.port_error and not report.route_error and not _loops_back(survey, host):
            why = f"{first} at {survey.master_address}:{number}: {report.port_error}"
            fix = f"open TCP between the hosts in {first}'s firewall, or {OTHER_ADDRESS.format(first)}"
            cells[host] = Cell("not reached", "bad", why, fix)
        elif first and not survey.hosts[first].port_error and not report.port_error:
            cells[host] = Cell("reached")
    return Row("master port", cells)


def keepalive(survey: Survey) -> Row:
    """ServerAliveInterval of this machine's ssh."""
    cells = {}
    for host, report in survey.hosts.items():
        if report.keepalive_seconds:
            cells[host] = Cell(f"every {report.keepalive_seconds} s")
        elif report.keepalive_seconds is not None:
            why = "ssh asks for no sign of life, and waits for a host that is gone until TCP gives up"
            fix = "ServerAliveInterval 15 in ~/.ssh/config of this machine"
            cells[host] = Cell("off", "warning", why, fix)
    return Row("ssh keepalive", cells)

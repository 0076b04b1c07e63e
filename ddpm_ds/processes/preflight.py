"""Check of hosts before they train: facts of each, differences between them, and one all-reduce.

Processes are started on the hosts as DeepSpeed's pdsh launcher would start training there, at the same time:

    python -m ddpm_ds.processes.preflight look '{"spec": ..., ...}'             a host's :class:`Findings`
    python -m ddpm_ds.processes.preflight all_reduce '{"rank": 0, ...}'         the backend, when all have answered

An answer is a line that begins with ``MARK``, because a login shell may print lines of its own.
"""

import json
import os
import shlex
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.config.spec_file import load_spec, spec_overrides
from ddpm_ds.ground.errors import UserError
from ddpm_ds.ground.host import processors
from ddpm_ds.ground.units import GIB, counted, gib
from ddpm_ds.processes.hosts import REMEDIES, address_of, answer_of, facts, ssh, ssh_to, use_interface_towards
from ddpm_ds.processes.supervisor import gpus
from ddpm_ds.schema.section import flatten

MARK = "ddpm-ds-doctor "
NETWORK = "open all TCP ports between the hosts, or name their interface in .deepspeed_env: GLOO_SOCKET_IFNAME=eth0"


class Cell(NamedTuple):
    """A column's text for a host, with a fault and its fix, if there is one."""

    text: str
    why: str = ""
    fix: str = ""


Findings = tuple[dict[str, str], dict[str, Cell], bool]
"""Facts that training compares (:func:`ddpm_ds.processes.hosts.facts`); other columns; whether the host has GPUs."""


@dataclass(frozen=True)
class Fleet:
    """Hosts and their ``slots``, and how to start a program there; ``local`` means this machine, without ssh."""

    slots: Mapping[str, int]
    python: str
    folder: str
    environment: Mapping[str, str]
    local: bool
    seconds: int

    def ask(self, what: str, questions: Mapping[str, Mapping[str, object]]) -> dict[str, Any]:
        """Return each host's answer to its question, or a :class:`Cell` with the reason for having none."""

        def answer(host: str) -> Any:
            program = [self.python, "-u", "-m", __name__, what, json.dumps(questions[host]), str(self.seconds)]
            words = shlex.join(["env", *(f"{name}={value}" for name, value in self.environment.items()), *program])
            command = ["sh", "-c", f"cd {shlex.quote(self.folder)} && exec {words}"]
            lines, why = answer_of(command if self.local else ssh(host, command), self.seconds)
            for line in lines:
                if line.startswith(MARK):
                    return json.loads(line.removeprefix(MARK))
            least = f"cd {shlex.quote(self.folder)} && {shlex.quote(self.python)} -c 'import ddpm_ds'"
            must = least if self.local else shlex.join([*ssh_to(host), least])
            fix = f"this must work without a question, within --timeout-seconds: {must}"
            return Cell("no", why or "no answer", NETWORK if what == "all_reduce" else fix)

        with ThreadPoolExecutor(len(questions)) as pool:
            return dict(zip(questions, pool.map(answer, questions), strict=True))


def examined(fleet: Fleet, question: Mapping[str, object], port: int, *, network: bool) -> dict[str, dict[str, Cell]]:
    """Return the cells of all hosts, by column; ``question`` has the first arguments of :func:`look`."""
    answers = fleet.ask("look", {host: {**question, "slots": slots} for host, slots in fleet.slots.items()})
    found = {host: answer for host, answer in answers.items() if not isinstance(answer, Cell)}
    table = {host: {"answers": Cell("yes") if host in found else answer} for host, answer in answers.items()}
    for name in dict.fromkeys(name for alike, _, _ in found.values() for name in alike):
        values = {host: alike.get(name, "missing") for host, (alike, _, _) in found.items()}
        usual, count = Counter(values.values()).most_common(1)[0]
        begin = next((begin for begin in REMEDIES if begin and name.startswith(begin)), "")
        fix = "give all hosts the same file" if ": " in name else REMEDIES[begin]
        for host, value in values.items() if count < len(values) else ():
            odd = ("", "") if value == usual else (f"{value[:40]}, others have {usual[:40]}", fix)
            table[host][name] = Cell(value[:12], *odd)
    for host, (_, cells, _) in found.items():
        table[host] |= {name: Cell(*cell) for name, cell in cells.items()}
    if network and len(found) == len(table) > 1:
        way = {"world": len(table), "address": address_of(next(iter(table))), "port": port}
        way |= {"on_gpus": all(on_gpus for _, _, on_gpus in found.values()), "seconds": fleet.seconds}
        sums = fleet.ask("all_reduce", {host: {**way, "rank": rank} for rank, host in enumerate(table)})
        for host, answer in sums.items():
            table[host]["all-reduce"] = answer if isinstance(answer, Cell) else Cell(answer)
    return table


def look(
    spec: str, overrides: Sequence[str], ds_config: str | None, run_dir: str, run_bytes: int, slots: int
) -> Findings:
    """Return this host's findings; paths are relative to the working folder."""
    documents: dict[str, Mapping[str, object]] = {}
    cells, folders = dict[str, Cell](), {"runs": (Path(run_dir), run_bytes, "--run-dir DIR")}
    try:
        read = load_spec(Path(spec), spec_overrides(overrides))
        documents[spec] = read.model_dump(mode="json")
        folders["data"] = (read.data.store_root, 0, "--set data.store_root=DIR")
        documents |= {} if ds_config is None else {ds_config: read_ds_config(Path(ds_config), overrides)}
    except UserError as error:
        cells["files"] = Cell("unreadable", str(error).splitlines()[0], "copy it to this host")
    on_gpus = os.environ.get("DS_ACCELERATOR") != "cpu" and gpus() > 0
    count, what = (gpus(), "GPU") if on_gpus else (processors(), "processor")
    few = (f"{counted(count, what)} for slots={slots}", f"write slots={count}") if count < slots else ()
    cells["devices"] = Cell(counted(count, what), *few)
    for name, (folder, needed, option) in folders.items():
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.isdir(path))
        free = shutil.disk_usage(there).free if os.access(there, os.W_OK) else 0
        least = max(needed, GIB)
        why = f"{gib(free)} that this user can write are free in {there}, and {gib(least)} are needed"
        small = (why, f"make room, or choose another folder: {option}") if free < least else ()
        cells[f"free for {name}"] = Cell(gib(free), *small)
    named = {f"{title}{key}": value for title, some in facts(documents).items() for key, value in flatten(some).items()}
    return named, cells, on_gpus


def all_reduce(rank: int, world: int, address: str, port: int, on_gpus: bool, seconds: int) -> str:
    """Add up the ranks' numbers and return the backend's name; may raise any exception."""
    use_interface_towards(address)
    import torch
    import torch.distributed as dist

    backend, device = ("nccl", "cuda:0") if on_gpus else ("gloo", "cpu")
    way = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
    limit = timedelta(seconds=seconds / 2)  # leaves time to print the reason
    dist.init_process_group(backend, init_method=way, rank=rank, world_size=world, timeout=limit)
    dist.all_reduce(total := torch.tensor([rank + 1.0], device=device))
    if total.item() != world * (world + 1) / 2:
        raise ArithmeticError(f"the sum is {total.item():g} instead of {world * (world + 1) // 2}")
    return backend


def main() -> None:
    """Answer one question for this host."""
    signal.alarm(int(sys.argv[3]))  # ends it even if its ssh has gone and everything else hangs
    try:
        answer = {"look": look, "all_reduce": all_reduce}[sys.argv[1]](**json.loads(sys.argv[2]))  # type: ignore[operator]
        print(MARK + json.dumps(answer), flush=True)
        os._exit(0)
    except Exception as error:
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr, flush=True)
        os._exit(1)  # destroying a broken group can hang


if __name__ == "__main__":
    main()

"""Ask every host everything that needs no process group, all hosts at the same time, and test their network.

here        facts? ─▶ of the first: port listens? ─▶ of the others: route? port reached? token seen? ─▶ release
each host   one process (probe.py), started as DeepSpeed's pdsh launcher starts training there

The network test is one small all-reduce on all hosts at the same time. :func:`network_test` starts on each host

    python -m ddpm_ds.cluster.survey ARGUMENTS_OF_TAKE_PART_IN_JSON

and collects the results. As in training, gloo listens where the first host is reached, and NCCL where its own variables
say.
"""

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from ddpm_ds.cluster.probe import MARK, HostFacts, tell
from ddpm_ds.processes.hosts import ssh, use_interface_towards
from ddpm_ds.processes.supervisor import DEFAULT_PORT

PROBE = "ddpm_ds.cluster.probe"
REACHED = {"step": "reached"}
"""The first answer of a host that was reached, before anything is looked for there."""
NO_FOLDER, NO_PYTHON, NO_SSH = 71, 72, 255
"""Exit codes: the working folder or the interpreter is not on the host; ssh's own."""
LEAVE_SECONDS = 5.0
LOGIN_SECONDS = 2.0
"""Time for ssh to look a name up, which its own limit does not count."""
CONNECT_SECONDS = 4.0
"""Time for a TCP connection within a cluster."""
OTHERS_SECONDS = 3.0
"""Time limit for the other hosts to report their errors once one has failed."""
ERROR_CHARACTERS = 240


class Ended(Exception):
    """The process has ended, with an exit code and its last line on stderr, or, without a code, gave no answer."""

    def __init__(self, code: int | None, last_line: str) -> None:
        super().__init__(last_line)
        self.code, self.last_line = code, last_line


class Conversation:
    """A process that answers questions in lines of JSON, in a process group of its own.

    Args:
        hear: function that gets each answer and, at the end, an :class:`Ended`; by default :meth:`ask` and
            :meth:`next` return or raise them.
    """

    def __init__(self, command: Sequence[str], hear: Callable[[Any], object] | None = None) -> None:
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the doctor alone, which then ends all of them
        )
        self._answers: queue.Queue[Any] = queue.Queue()
        self._hear = hear or self._answers.put
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._hear(json.loads(line.removeprefix(MARK)))
        code = self._process.wait()
        self._stderr.seek(0)
        said = [line.strip() for line in self._stderr if line.strip()]
        self._hear(Ended(code, said[-1] if said else ""))

    def ask(self, ask: str, seconds: float, /, **arguments: Any) -> Any:
        """Ask a question and return the answer; raises what :meth:`next` does."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which is noticed below
            self._process.stdin.write(json.dumps({"ask": ask, **arguments}) + "\n")
            self._process.stdin.flush()
        return self.next(seconds)

    def next(self, seconds: float) -> Any:
        """Return the next answer.

        Raises:
            Ended: there was none within ``seconds``, or there will be no more.
        """
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise Ended(None, f"no answer in {seconds:g} s") from None
        if isinstance(answer, Ended):
            raise answer
        return answer

    def close(self) -> None:
        """Close its input, which ends it, and kill it if it does not end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._reader.join(LEAVE_SECONDS)
        self.kill()
        self._reader.join(LEAVE_SECONDS)
        self._stderr.close()

    def kill(self) -> None:
        """Kill it at once, with everything that it has started, unless it has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class PlannedRun:
    """The run that hosts are checked for, which starts the same way on each."""

    python: str
    folder: str
    """The working folder."""
    environment: Mapping[str, str]
    """The variables that DeepSpeed gives to every process."""
    travels: Mapping[str, str]
    """The variables of this machine that every rank needs."""
    spec: str
    overrides: tuple[str, ...]
    ds_config: str | None
    run_dir: str
    checkpoint_bytes: int
    """Size on all hosts together of the checkpoints that are kept and of the one being written."""
    local: bool = False
    """Whether it runs on this machine alone, which needs no ssh."""
    master_address: str = ""
    """Address of the first host; empty to ask the host for it, as DeepSpeed does."""
    master_port: int = DEFAULT_PORT
    seconds: int = 60
    """Silence after which a host is given up."""
    connect_seconds: int = 10
    """Time for ssh to reach a host."""

    def command(self, host: str, module: str, *arguments: str) -> list[str]:
        """Return the command line that runs ``python -m module`` on ``host``, by ssh unless it is this machine.

        Raises:
            SpecError: ssh would take ``host`` for an option.
        """
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        words = shlex.join(["env", *variables, self.python, "-u", "-m", module, *arguments])
        script = (
            f"echo {shlex.quote(MARK + json.dumps(REACHED))}; cd {shlex.quote(self.folder)} || exit {NO_FOLDER}; "
            f"test -x {shlex.quote(self.python)} || exit {NO_PYTHON}; exec {words}"
        )
        there = ["sh", "-c", script]
        return there if self.local else ssh(host, there, connect_seconds=self.connect_seconds)


class Failure(NamedTuple):
    """Step at which a host could not be asked (ssh, folder, python or ddpm_ds), and the reason."""

    at: str
    why: str


@dataclass
class HostReport:
    """The findings about a host; for one that can't be asked only the reason."""

    slots: int | None
    """Number of processes in the hostfile; None without a hostfile."""
    failure: Failure | None = None
    facts: HostFacts | None = None
    run_dir_shared: bool | None = None
    """Whether the folder of runs is the first host's; None if that was not tried."""
    interface: str = ""
    address: str = ""
    """The interface towards the first host, and this host's address there."""
    route_error: str = ""
    port_error: str = ""
    """Reason why the port can't be taken (on the first host) or reached (on others)."""


@dataclass(frozen=True)
class Survey:
    """All hosts, in the hostfile's order."""

    run: PlannedRun
    hosts: dict[str, HostReport]
    master: str
    """The first host that answers; empty if none does."""
    master_address: str

    @property
    def facts(self) -> dict[str, HostFacts]:
        """The facts of the hosts that answer."""
        return {host: report.facts for host, report in self.hosts.items() if report.facts is not None}


def survey(hosts: Mapping[str, int | None], run: PlannedRun, log: Callable[[str], None]) -> Survey:
    """Ask the hosts, given with their slots; ``log`` gets a line for each step."""
    reports = {host: HostReport(slots) for host, slots in hosts.items()}
    talks: dict[str, Conversation] = {}

    def each(names: Iterable[str], step: Callable[[Conversation, HostReport], None]) -> None:
        """Take a step with several hosts at the same time."""

        def take(host: str) -> None:
            try:
                step(talks[host], reports[host])
            except Ended as ended:
                talks[host].kill()
                reports[host] = HostReport(hosts[host], failure=_failure(ended, run.local))

        list(pool.map(take, names))

    def meet(talk: Conversation, report: HostReport) -> None:
        talk.next(run.connect_seconds + LOGIN_SECONDS)  # REACHED
        _ask_facts(talk, report, run)

    with ThreadPoolExecutor(len(hosts)) as pool:
        try:
            log(f"asking {', '.join(hosts)}")
            for host in hosts:
                talks[host] = Conversation(run.command(host, PROBE))
            each(hosts, meet)
            master, *others = [host for host, report in reports.items() if report.facts is not None] or [""]
            address = run.master_address
            if facts := master and reports[master].facts:
                address = address or ("127.0.0.1" if run.local else next(iter(facts.addresses), ""))
                where = address or "no known address"
                log(f"folders, and the way to port {run.master_port} of {master} at {where}")
                way: dict[str, Any] = {"address": address, "port": run.master_port}

                def open_first(talk: Conversation, report: HostReport) -> None:
                    found = talk.ask("open", run.seconds, **way, run_dir=run.run_dir)
                    way.update(token=found.pop("token"), port=None if "port_error" in found else run.master_port)
                    vars(report).update(found)

                def reach_first(talk: Conversation, report: HostReport) -> None:
                    limit = run.seconds + CONNECT_SECONDS
                    vars(report).update(talk.ask("reach", limit, **way, seconds=CONNECT_SECONDS))

                each([master], open_first)
                if reports[master].failure:
                    master = ""
                else:
                    each(others, reach_first)
        except BaseException:  # Ctrl-C: ends the threads that wait for answers
            for talk in talks.values():
                talk.kill()
            raise
        finally:
            list(pool.map(Conversation.close, talks.values()))
    return Survey(run, reports, master, address)


def _failure(ended: Ended, local: bool) -> Failure:
    if ended.code in (NO_FOLDER, NO_PYTHON):
        return Failure("folder" if ended.code == NO_FOLDER else "python", ended.last_line or "missing")
    at = "ssh" if ended.code in (NO_SSH, None) and not local else "ddpm_ds"
    return Failure(at, ended.last_line.removeprefix("ssh: ") or f"exit code {ended.code}")


def _ask_facts(talk: Conversation, report: HostReport, run: PlannedRun) -> None:
    """Ask for the facts of a host."""
    from pydantic import TypeAdapter, ValidationError

    about = {"spec": run.spec, "overrides": run.overrides, "ds_config": run.ds_config, "run_dir": run.run_dir}
    try:
        report.facts = TypeAdapter(HostFacts).validate_python(talk.ask("facts", run.seconds, **about))
    except ValidationError:
        report.failure = Failure("ddpm_ds", "another version of ddpm_ds answers")


@dataclass
class Network:
    """Results of the test."""

    hosts: Sequence[str]
    backend: str
    all_reduce_seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Errors by host; a host without one may have waited for a host that failed."""


def network_test(
    hosts: Sequence[str], run: PlannedRun, address: str, backend: str, log: Callable[[str], None]
) -> Network:
    """Run the test between hosts, until it is done or no host has said anything for ``run.seconds``.

    ``address`` is that of the first host, ``backend`` is gloo or nccl.
    """
    network, heard = Network(hosts, backend), queue.SimpleQueue[tuple[int, Any]]()
    port, seconds = run.master_port, run.seconds
    log(f"{backend} over {address}:{port} between {', '.join(hosts)}")
    told = {"world": len(hosts), "address": address, "port": port, "seconds": seconds, "backend": backend}
    steps = dict.fromkeys(range(len(hosts)), "starting")  # of the ranks that are at work

    def hear(rank: int, said: Any) -> None:
        heard.put((rank, said))

    with ExitStack() as stack:
        for rank, host in enumerate(hosts):
            command = run.command(host, __name__, json.dumps({"rank": rank, **told}))
            talk = Conversation(command, hear=partial(hear, rank))
            stack.callback(talk.close)
        while steps:
            try:
                rank, said = heard.get(timeout=OTHERS_SECONDS if network.errors else seconds)
            except queue.Empty:
                if not network.errors:
                    network.errors = {
                        hosts[rank]: f"nothing heard for {seconds} s, last: {step}" for rank, step in steps.items()
                    }
                break
            if rank not in steps:
                continue
            if isinstance(said, Ended):
                lost = "ssh was lost: " if said.code == NO_SSH else ""
                said = {"error": lost + (said.last_line or f"exit code {said.code}, last: {steps[rank]}")}
            steps[rank] = said.get("step", steps[rank])
            if "error" in said:
                network.errors[hosts[rank]] = textwrap.shorten(said["error"], ERROR_CHARACTERS, placeholder="...")
            if "all_reduce_seconds" in said:
                network.all_reduce_seconds[hosts[rank]] = said["all_reduce_seconds"]
            if "error" in said or steps[rank] == "done":
                del steps[rank]
    return network


def all_reduce(rank: int, world: int, backend: str) -> float:
    """Return the seconds of an all-reduce in an existing process group; under NCCL the second one, on the GPU.

    Raises:
        ArithmeticError: the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    seconds = 0.0
    for device in [torch.device("cpu")] + ([torch.device("cuda", 0)] if backend == "nccl" else []):
        began = time.perf_counter()
        total = torch.tensor([rank + 1.0], device=device)
        dist.all_reduce(total)
        found = total.item()
        seconds = time.perf_counter() - began
        if found != world * (world + 1) / 2:
            raise ArithmeticError(f"an all-reduce on {device} gave {found:g} instead of {world * (world + 1) // 2}")
    return seconds


def take_part(rank: int, world: int, address: str, port: int, seconds: int, backend: str) -> None:
    """Take part in the test as one rank; results and errors are sent to the asking side."""
    signal.alarm(2 * seconds)  # ends it even if everything else hangs
    threading.Thread(target=_leave_with_the_asking_side, daemon=True).start()
    use_interface_towards(address)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    tell({"step": "rendezvous"})
    reached_at = f"[{address}]" if ":" in address else address
    try:
        if backend == "nccl":
            torch.cuda.set_device(0)
        dist.init_process_group(
            "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl",
            init_method=f"tcp://{reached_at}:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=seconds),
        )
        tell({"step": "connected"})
        tell({"all_reduce_seconds": all_reduce(rank, world, backend)})
        dist.destroy_process_group()
    except (RuntimeError, ArithmeticError) as error:
        tell({"error": " ".join(str(error).split())})
        os._exit(1)  # a group that is broken can hang when it is destroyed
    tell({"step": "done"})


def _leave_with_the_asking_side() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    take_part(**json.loads(sys.argv[1]))

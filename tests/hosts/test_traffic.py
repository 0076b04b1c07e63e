"""What a plan says crosses the hosts is what their switch carries, whichever axis of the layout is split over them."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.hosts.hosts import Hosts
from tests.hosts.namespaces import Program
from tests.hosts.traffic_worker import STEPS
from tests.launching import REPOSITORY, write_json

pytestmark = pytest.mark.launch
WORKER = Path(__file__).with_name("traffic_worker.py")
DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
CASES = [(schedule, across) for schedule in ("1f1b", "folded") for across in ("stages", "replicas")]
SAID = re.compile(
    r"hosts +2 x 2 processes, (?P<across>\w+) across hosts: (?P<between>[\d.,]+) MB .*between them, "
    r"each sends (?P<each>[\d.,]+) MB; \w+ across would be (?P<other>[\d.,]+) MB"
)
TIMEOUT = 240.0


class Counted(NamedTuple):
    """Of one layout: what was said, and the bytes of a step by host that sent them."""

    said: dict[str, str]
    sent: dict[str, float]

    def megabytes(self, name: str) -> float:
        """A number that was said, in bytes."""
        return 1e6 * float(self.said[name].replace(",", ""))


def wait_for(path: Path, ranks: list[Program], printed: list[Path]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not path.exists():
        ended = [rank for rank, program in enumerate(ranks) if program.poll()]
        assert not ended, "\n".join(printed[rank].read_text()[-2000:] for rank in ended)
        assert time.monotonic() < deadline, "".join(file.read_text()[-1000:] for file in printed)
        time.sleep(0.01)


def test_a_step_sends_between_hosts_what_its_plan_says(hosts: Hosts, tmp_path: Path) -> None:
    """2 hosts x 2 processes as 2 stages x 2 replicas, in both schedules and both ways round."""
    cases: list[dict[str, Any]] = []
    for schedule, across in CASES:
        config = {
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "scheduler": {"type": "WarmupLR"},
            "zero_optimization": {"stage": 2},
            "pipeline": {"schedule": schedule, "across_hosts": across},
        }
        file = write_json(tmp_path / f"{schedule}-{across}.json", config)
        overrides = ["train.batch_images=32", "train.accumulation=4"]
        cases.append({"spec": str(DIGITS), "overrides": overrides, "config": str(file)})
    folder = tmp_path / "met"
    folder.mkdir()
    command = [sys.executable, str(WORKER), str(write_json(tmp_path / "cases.json", cases)), str(folder)]
    printed = [tmp_path / f"rank{rank}" for rank in range(4)]
    common = {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    ranks = [
        hosts[rank // 2].start(command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}, printed[rank])
        for rank in range(4)
    ]
    counted = {}
    for number, case in enumerate(CASES):
        wait_for(folder / f"{number}.said", ranks, printed)
        said = SAID.fullmatch((folder / f"{number}.said").read_text())
        assert said is not None, (folder / f"{number}.said").read_text()
        before = hosts.bytes_between()
        (folder / f"{number}.go").touch()
        wait_for(folder / f"{number}.done", ranks, printed)
        after = hosts.bytes_between()
        sent = {name: (after[name].sent - before[name].sent) / STEPS for name in after}
        counted[case] = Counted(said.groupdict(), sent)
    assert [program.wait(TIMEOUT) for program in ranks] == [0, 0, 0, 0]

    for (schedule, across), one in counted.items():
        other = counted[schedule, "replicas" if across == "stages" else "stages"]
        assert one.said["across"] == across
        assert sum(one.sent.values()) == pytest.approx(one.megabytes("between"), rel=0.1), (schedule, across)
        assert all(size == pytest.approx(one.megabytes("each"), rel=0.1) for size in one.sent.values()), one
        assert sum(other.sent.values()) == pytest.approx(one.megabytes("other"), rel=0.1), (schedule, across)

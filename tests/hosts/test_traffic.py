"""The bytes that a plan says cross the hosts are those that they send, whichever axis of the layout is split."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.hosts.hosts import Hosts
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


def test_a_step_sends_between_hosts_what_its_plan_says(hosts: Hosts, tmp_path: Path) -> None:
    """2 hosts x 2 processes as 2 stages x 2 replicas, in both schedules and both ways round."""
    cases = []
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
    command = [sys.executable, str(WORKER), str(write_json(tmp_path / "cases.json", cases))]
    world = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    world |= {"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": "eth0"}
    printed = [tmp_path / f"rank{rank}" for rank in range(4)]
    ranks = [
        hosts[rank // 2].start(command, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}, printed[rank])
        for rank in range(4)
    ]
    codes = [program.wait(TIMEOUT) for program in ranks]
    assert codes == [0, 0, 0, 0], "".join(file.read_text()[-2000:] for file in printed)

    counted = [re.findall(r"^counted (.*)", printed[rank].read_text(), re.MULTILINE) for rank in (0, 2)]
    between: dict[tuple[str, str], float] = {}
    others: dict[tuple[str, str], float] = {}
    for (schedule, across), *lines in zip(CASES, *counted, strict=True):
        (line, first), (_, second) = map(json.loads, lines)
        said = SAID.fullmatch(line)
        assert said is not None and said["across"] == across, line
        total, each, other = (1e6 * float(said[name].replace(",", "")) for name in ("between", "each", "other"))
        assert first + second == pytest.approx(total, rel=0.1), (schedule, across)
        assert [first, second] == pytest.approx([each, each], rel=0.1), (schedule, across)
        between[schedule, across] = first + second
        others[schedule, "replicas" if across == "stages" else "stages"] = other
    assert between == pytest.approx(others, rel=0.1), "what is said of the other axis"

"""Hosts that call each other by name, as Slurm's do, where each has a loopback address for its own, as on Debian."""

import re
import sys
from pathlib import Path

import pytest

from ddpm_ds.ground.errors import EXIT_BAD_INPUT
from tests.hosts.hosts import UNMETERED, Host, Hosts
from tests.launching import place_digits
from tests.training.ranks import arguments, checkpoints

CHANGES = ("train.images=32", "samples.every_images=null", "evaluation.every_images=null")
GLOO, PORT, SECONDS = "GLOO_SOCKET_IFNAME", "29512", 120.0


def train(
    hosts: Hosts, folder: Path, on_loopback: Host | None = None, *, gpus: bool = False
) -> tuple[list[int], list[str]]:
    """Train on two ranks on each host, or one with a GPU, as started by Slurm; return the codes and what each said."""
    place_digits(folder)
    command = ["launch/train.py", *arguments(folder / "run", CHANGES, "zero1_fp32.json", ["-p", "2"])]
    count = 1 if gpus else 2
    world = {"WORLD_SIZE": str(2 * count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": hosts[0].name}
    world |= {"MASTER_PORT": PORT, "DS_ACCELERATOR": "cuda" if gpus else "cpu"}
    outputs, programs = [folder / f"said-{rank}" for rank in range(2 * count)], []
    for rank, output in enumerate(outputs):
        host = hosts[rank // count]
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % count), **({GLOO: "lo"} if host is on_loopback else {})}
        own |= {"CUDA_VISIBLE_DEVICES": str(rank)} if gpus else {}
        programs.append(host.start([sys.executable, *command], UNMETERED | world | own, output))
    codes = [program.wait(SECONDS) for program in programs]
    return codes, [output.read_text() for output in outputs]


@pytest.mark.parametrize(
    ("network", "gpus"),
    [
        ("10.77.0", False),
        ("172.20.9", False),
        ("192.168.77", False),
        pytest.param("192.168.77", True, id="several_gpus", marks=pytest.mark.gpu(2)),
    ],
)
def test_hosts_train_although_each_calls_itself_loopback(
    can_make_hosts: None, network: str, gpus: bool, tmp_path: Path
) -> None:
    with Hosts(tmp_path / "made", visible=tmp_path, network=network, debian=True) as hosts:
        codes, said = train(hosts, tmp_path, gpus=gpus)
    assert codes == [0] * len(codes) and checkpoints(tmp_path / "run") == ["images-000000032"], said


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_host_that_can_not_be_reached_ends_all_with_the_documented_line(
    can_make_hosts: None, wrong: int, tmp_path: Path
) -> None:
    """PyTorch lets rank 0 wait for it much longer than it was told to."""
    with Hosts(tmp_path / "made", visible=tmp_path, network="172.20.9", debian=True) as hosts:
        codes, said = train(hosts, tmp_path, on_loopback=hosts[wrong])
    assert codes == [EXIT_BAD_INPUT] * 4, (codes, said)
    words = r"^ddpm_ds: error: rank \d \(host \S+\) can't connect to the ranks of other hosts over interface \w+ \("
    assert len(re.findall(words, "\n".join(said), re.MULTILINE)) == 1, said

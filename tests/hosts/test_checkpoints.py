"""A run whose hosts share no folder: each keeps what it owns, and it goes on from there wherever its pieces are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ddpm_ds.checkpoint.folder import names
from ddpm_ds.checkpoint.reader import Reader
from tests.hosts import test_training
from tests.hosts.hosts import UNMETERED, Hosts
from tests.hosts.test_training import CONFIG, TRAIN_SECONDS, run_dir_with_store
from tests.launching import write_json
from tests.train.ranks import Ranks, arguments, end_of, mlflow_run, points

pytestmark = pytest.mark.launch

CHANGES = (*test_training.CHANGES, "samples.every_images=null", "evaluation.every_images=null")
HALF, WHOLE = 48, 96
"""Images after which the run stops, and in all."""


def train(
    hosts: Hosts, run_dir: Path, config: Path, order: Sequence[int], images: int, slots: int = 2
) -> tuple[int, str]:
    """Two stages until ``images``, on the hosts in this order; the exit code and what was said."""
    hostfile = hosts.hostfile(run_dir.with_name("hostfile"), slots, [hosts[index].name for index in order])
    options = arguments(run_dir, [*CHANGES, f"train.images={images}"], str(config), ["-p", "2"])
    program = ["deepspeed", "--hostfile", str(hostfile), "launch/train.py", *options]
    done = hosts[order[0]].run(program, UNMETERED, timeout=TRAIN_SECONDS)
    return done.returncode, done.stdout


def pieces(folder: Path, images: int) -> list[str]:
    """What a host has of a checkpoint."""
    return sorted(path.name for path in (folder / "checkpoints" / f"images-{images:09d}").iterdir())


def merged(folders: Sequence[Path], images: int, to: Path) -> Reader:
    """The checkpoint as somebody would bring it together."""
    for folder in folders:
        shutil.copytree(folder / "checkpoints" / f"images-{images:09d}", to, dirs_exist_ok=True)
    return Reader(to)


def test_each_host_keeps_its_own_and_the_run_goes_on_from_wherever_the_pieces_are(
    hosts: Hosts, tmp_path: Path, empty_store: Path
) -> None:
    values = json.loads(CONFIG.read_text())
    values |= {"pipeline": {"across_hosts": "stages"}, "flops_profiler": {"enabled": False}}
    config = write_json(tmp_path / "config.json", values)
    (tmp_path / "reference").mkdir()
    reference = run_dir_with_store(tmp_path / "reference", empty_store)
    with Ranks(reference, *CHANGES, f"train.images={WHOLE}", options=["-p", "2"], config=str(config), count=4) as ranks:
        assert ranks.codes(TRAIN_SECONDS) == [0] * 4, ranks.said[-4000:]
    (tmp_path / "apart").mkdir()
    run_dir = run_dir_with_store(tmp_path / "apart", empty_store)
    one, two = (host.private(run_dir) for host in hosts)

    code, said = train(hosts, run_dir, config, (0, 1), HALF)
    assert code == 0, said[-6000:]
    small = ["manifest.json", "stage{}-replica0.safetensors", "stage{}-replica1.safetensors", "state.json"]
    assert pieces(one, HALF) == [name.format(0) for name in small]
    assert pieces(two, HALF) == [name.format(1) for name in small]
    assert not [path for path in run_dir.iterdir() if path.name != ".lock"], "nothing beside the hosts' own folders"

    code, said = train(hosts, run_dir, config, (1, 0), WHOLE)  # worker-2 is first, and has the other stage
    assert code == 0, said[-6000:]
    assert "resuming from" in said and "images-000000048: 0." in said
    assert "MB of it go from host worker-1, worker-2 to host worker-1, worker-2" in said
    assert pieces(two, WHOLE) == [name.format(0) for name in small]

    expected, found = end_of(reference), merged([one, two], WHOLE, tmp_path / "merged")
    assert found.state == expected.state
    for kind in expected.kinds:
        for name in expected.manifest.parameters:
            assert torch.equal(found.read(kind, name), expected.read(kind, name)), f"{kind} of {name}: bit for bit"
    curve = [(point["progress/images"], point["train/loss"]) for run in (one, two) for point in points(run)]
    assert curve == [(point["progress/images"], point["train/loss"]) for point in points(reference)]
    assert mlflow_run(run_dir)[1].data.tags["resume_count"] == "1", "one run, although rank 0 was on another host"

    shutil.rmtree(two / "checkpoints")
    code, said = train(hosts, run_dir, config, (0, 1), 2 * WHOLE, slots=1)
    assert code == 2
    (error,) = {line.partition(": error: ")[2] for line in said.splitlines() if "ddpm_ds: error: " in line}
    assert "none of the 2 checkpoints in" in error and "images-000000096 lacks stage0-replica0.safetensors" in error
    assert f"which host worker-2 wrote in {run_dir}/checkpoints (it has that no more)" in error
    assert names(one / "checkpoints") == [f"images-{images:09d}" for images in (HALF, WHOLE)], "nothing was begun anew"

"""The printed plan: its lines on layout, batch and hosts, before and after the ranks have met."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from ddpm_ds.cli.plan import decided_since, describe_plan, hosts_line, stage_table
from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.ground.units import rounded
from ddpm_ds.pipeline.cuts import partition, relayed_elements
from ddpm_ds.pipeline.placement import traffic
from ddpm_ds.planning.inputs import machine_like
from ddpm_ds.planning.run_plan import RunDraft, RunPlan, make_plan
from ddpm_ds.unet.layers import unet_layers
from tests.launching import REPOSITORY, drafted, tiny_text_spec, write_json

DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
CONFIG = REPOSITORY / "ds_configs" / "zero2_fp16.json"
TWO_BY_TWO = ("0", "0", "1", "1")


def plan(hosts: tuple[str, ...] | None, stages: int = 2, world_size: int = 4, **pipeline: Any) -> RunDraft:
    """Plan of the main JSON under 1F1B, with further changes of its block ``pipeline``."""
    config = read_ds_config(CONFIG)
    config["pipeline"] |= {"schedule": "1f1b", **pipeline}
    with TemporaryDirectory() as folder:
        file = write_json(Path(folder, "ds.json"), config)
        return drafted(DIGITS, [], file, world_size=world_size, stages=stages, hosts=hosts)


def unwrapped(text: str) -> list[str]:
    return text.replace("\n" + 13 * " ", " ").splitlines()


def lines_of(made: RunDraft) -> list[str]:
    """Lines of the printed plan, before they are wrapped."""
    return unwrapped(describe_plan(made, Path("runs/x")))


def hosts_of(made: RunDraft) -> str | None:
    return hosts_line(made.grid, made.exchange)


def met(draft: RunDraft, hosts: Sequence[str]) -> RunPlan:
    """Plan of ranks that have met on these hosts."""
    return make_plan(draft, hosts, machine_like("cpu", 2**34, half=True, devices=len(hosts), nodes=1))


def test_a_plan_is_described_in_words_that_fit_its_numbers() -> None:
    changes = ["evaluation.every_images=null", "train.accumulation=1", "train.batch_images=1", "train.images=1"]
    changes += ["optimizer.warmup_images=0"]
    one = drafted(DIGITS, changes, CONFIG, world_size=1, stages=1)
    lines = lines_of(one)
    for line in (
        "layout       1 process: 1 stage x 1 replica",
        "batch        1 image = 1 micro-batch of 1 x 1 replica",
        "length       1 image = 1 step, logged every 3,200 images",
        "samples      64 images by dpm_solver in 20 steps, every 32,000 images (1.3% of the computing)",
        "validation   off",
    ):
        assert line in lines
    assert "sent MB/step" not in stage_table(one) and "sent MB/step" in stage_table(plan(None))


@pytest.mark.parametrize(
    ("count", "said"), [(0, "all images of val at 9 noise levels, every 64,000 images"), (64, "64 images of val at 9 ")]
)
def test_a_held_out_source_is_named(count: int, said: str) -> None:
    changes = ["data.source=folder", "data.path=train", "data.held_out_path=val", f"data.held_out_images={count}"]
    changes.append("evaluation.every_images=64000")
    one = drafted(DIGITS, changes, CONFIG, world_size=1, stages=1)
    (line,) = (line for line in lines_of(one) if line.startswith("validation"))
    assert said in line and ("% of the computing" in line) is bool(count)


STABLE_DIFFUSION_2 = ["unet.text.context_channels=1024", "unet.text.heads=[5,10,20,20]"]


@pytest.mark.parametrize(
    ("spec", "changes", "parameters", "sent", "relayed", "share"),
    [
        ("sdxl", [], 2_567_463_684, 12_455_680, 79_120_128, "15.7%"),
        ("sd15", STABLE_DIFFUSION_2, 865_910_724, 7_704_320, 19_081_984, "40.4%"),
    ],
)
def test_elements_between_four_stages_are_printed_beside_a_relays(
    spec: str, changes: list[str], parameters: int, sent: int, relayed: int, share: str
) -> None:
    file, config = REPOSITORY / "launch" / "specs" / f"{spec}.yaml", REPOSITORY / "ds_configs" / "zero2_bf16.json"
    found = drafted(file, ["data.path=pictures", *changes], config, world_size=4, stages=4)
    line = next(line for line in lines_of(found) if line.startswith("messages"))
    assert found.parameters == parameters
    assert sum(stage.sent_elements for stage in found.stages) == sent
    images = found.spec.train.batch_images
    assert line == (
        f"messages     {rounded(2 * images * sent / 1e6, 4)} MB a step and direction between stages, {share} of the "
        f"{rounded(2 * images * relayed / 1e6, 4)} MB of a relay of all skips and the text"
    )


def test_a_relay_sends_h_the_embedding_each_skip_and_the_text_over_every_cut() -> None:
    spec = tiny_text_spec()
    layers = unet_layers(spec.unet, spec.data.interface)
    assert partition(layers, 2, "flops")[1:-1] == (23,)  # before up.1.block.1
    text = 5 * 6
    assert relayed_elements(layers, 2) == 16 * 16 + 32 + 2 * 8 * 64 + 8 * 16 + text


def test_one_host_has_no_word_of_hosts() -> None:
    one = plan(None, across_hosts="replicas")
    assert one.grid.across == "stages"
    assert "host" not in stage_table(one) and "\nhosts " not in describe_plan(one, Path("runs/x"))


def test_the_bytes_between_hosts_are_printed_with_the_alternative() -> None:
    """ZeRO-2 would send gradients of 701,345 weights to their owners after each of 8 micro-batches, and the new weights
    back: 8 + 1 times 2 x 1/2 bytes each over 2 edges.
    """
    two = plan(TWO_BY_TWO)
    gradients = 701_345 * (8 + 1) * 2 * 0.5 * 2
    line = hosts_of(two)
    assert line is not None and line in lines_of(two)
    assert line.startswith(
        "hosts        2 x 2 processes, stages across hosts: 1.475 MB of activations a step between them,"
    )
    assert line.endswith(f"each sends 0.7373 MB; replicas across would be {gradients / 1e6:.4g} MB")
    assert [row.split()[-1] for row in stage_table(two).splitlines()] == ["host", "0", "1"]
    assert two.grid.across == "stages"


def test_the_json_decides_otherwise() -> None:
    other = plan(TWO_BY_TWO, across_hosts="replicas")
    line = hosts_of(other)
    assert line is not None and "replicas across hosts: 12.62 MB a step, 11.22 MB of gradients and 1.403 MB of" in line
    assert "stages across would be 1.475 MB" in line
    assert [row.split("  ")[-1] for row in stage_table(other).splitlines()][1:] == ["0, 1", "0, 1"]


def test_hosts_get_their_names_when_the_ranks_have_met() -> None:
    named = met(plan(TWO_BY_TWO), ["worker-1", "worker-1", "worker-2", "worker-2"])
    assert [row.split()[-1] for row in stage_table(named).splitlines()] == ["host", "worker-1", "worker-2"]
    assert hosts_of(named) == hosts_of(plan(TWO_BY_TWO))
    assert met(plan(TWO_BY_TWO), ["same"] * 4).grid.hosts == TWO_BY_TWO
    fold = stage_table(plan(TWO_BY_TWO, schedule="auto")).splitlines()[1:]
    assert [(row.split()[3], row.split()[-1]) for row in fold] == [("0", "0"), ("1", "1"), ("1", "1"), ("0", "0")]
    many = plan(tuple(str(rank) for rank in range(8)), world_size=8)
    assert [row.split("  ")[-1] for row in stage_table(many).splitlines()][1:] == ["0 ... 3 (4)", "4 ... 7 (4)"]


def test_hosts_of_different_sizes_are_known_when_the_ranks_have_met() -> None:
    before = plan(())
    line = hosts_of(before)
    assert line is not None and "known once the ranks have met" in line and before.grid.across == "stages"
    after = hosts_of(met(before, ["a", "a", "a", "b"]))
    assert after is not None and after.startswith("hosts        3 + 1 processes, stages across hosts: ")


def test_the_plan_of_a_large_run_fits_a_terminal() -> None:
    hosts = tuple(f"worker-{rank // 8}" for rank in range(64))
    changes = ["data.path=pictures", "train.batch_images=64", "ds.pipeline.tensor.size=2"]
    config = REPOSITORY / "ds_configs" / "zero2_bf16.json"
    spec = REPOSITORY / "launch" / "specs" / "sdxl.yaml"
    found = drafted(spec, changes, config, world_size=64, stages=16, hosts=hosts)
    lines = describe_plan(found, Path("runs/x")).splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= 39  # and the forecast
    rows = [line for line in lines if " on rank " in line]
    assert rows[0].split()[0] == "0" and rows[-1].split()[0] == "31" and "..." in lines
    assert len(stage_table(found).splitlines()) == 33, "the run's folder has them all"


@pytest.mark.parametrize(("stages", "apart"), [(1, "replicas"), (4, "stages")])
def test_what_can_not_be_turned_is_not_compared(stages: int, apart: str) -> None:
    line = hosts_of(plan(TWO_BY_TWO, stages=stages))
    assert line is not None and f" {apart} across hosts: " in line and "would be" not in line


def tensor_lines_of(made: RunDraft) -> list[str]:
    lines = lines_of(made)
    return [line for line in lines if line.startswith(("layout", "tensor", "warning"))]


def test_a_plan_says_what_tensor_groups_split_what_stays_whole_and_what_the_sums_cost() -> None:
    planned = plan(None, 1, 4, tensor={"size": 2})
    layout, said = tensor_lines_of(planned)
    assert layout == "layout       4 processes: 1 stage x 2 tensor ranks x 2 replicas"
    # blocks in order: down.0, down.1, middle twice, up.1 twice, up.0 twice; a sum of each output and each input
    wide, deep = 32 * 64, 64 * 16
    outputs, inputs = 3 * wide + 5 * deep, wide + (32 + 2 * 64 + 128 + 96) * 16 + (96 + 64) * 64
    sent = 2 * 32 * (outputs + inputs + 128)  # in fp16, for each of 32 images, and the embedding's once
    norms = 2 * 2 * (32 + 32 + 2 * 64 + 128 + 96 + 96 + 64) // 2  # their gradients, of which a replica owns half
    whole = sum(layer.parameters for layer in planned.layers if not layer.sums)
    given = 2 * whole // 2 // 2  # their gradients, which the first rank gives the other, and a replica owns half of
    sent += norms + given
    assert said == (
        "tensor       2 groups of 2 ranks, 8 of 17 layers split; down.1.attention.0, middle.attention ... "
        f"up.1.attention.1 (4 layers) stay whole: 1 head; a rank sends {sent / 1e6:,.4g} MB a step to sum their parts"
    )
    again = plan(None, 1, 4, tensor={"size": 2}, activation_checkpoint_interval=3)
    (said,) = tensor_lines_of(again)[1:]
    walks = 5  # of three layers after the first: six, of which one has no block
    last = 2 * deep + wide  # the last sums of three walks, before which recomputing stops
    sent = 2 * 32 * (2 * outputs - last + inputs + walks * 128) + norms + given
    assert f"a rank sends {sent / 1e6:,.4g} MB" in said
    assert not tensor_lines_of(plan(None))[1:]


def test_tensor_groups_across_hosts_are_warned_of_once_the_hosts_are_known() -> None:
    split = {"size": 2}
    assert len(tensor_lines_of(plan(TWO_BY_TWO, 1, tensor=split))) == 2, "each group is on one host"
    apart = plan(TWO_BY_TWO, 1, tensor={"size": 4})
    *_, warning = tensor_lines_of(apart)
    assert warning.startswith("warning      1 tensor group across hosts: each rank sends ")
    unknown = plan((), 1, tensor={"size": 4})
    assert warning in unwrapped(decided_since(unknown, met(unknown, TWO_BY_TWO)))
    assert warning not in decided_since(apart, apart)


def test_space_groups_across_hosts_are_warned_of_with_their_price_and_a_size_that_stays_on_a_host() -> None:
    def lines(hosts: tuple[str, ...], size: int) -> list[str]:
        found = lines_of(plan(hosts, 1, space={"size": size}))
        return [line for line in found if line.startswith(("warning", "hosts"))]

    *_, kept = lines(TWO_BY_TWO, 2)
    assert kept.startswith("hosts ") and "of swaps" not in kept
    apart = plan(TWO_BY_TWO, 1, space={"size": 4})
    _, warning, hosts = lines(TWO_BY_TWO, 4)
    each = apart.exchange.swaps[0] / 1e6
    assert warning == (
        f"warning      1 space group across hosts: each rank sends {each:,.4g} MB a step to others that share its "
        "images, and waits for each message; use a pipeline.space.size below 4 that divides the processes of a host"
    )
    assert f"{traffic(apart.grid, apart.exchange).swaps / 1e6:,.4g} MB of swaps" in hosts


def test_the_table_of_stages_counts_whole_stages_whatever_is_split() -> None:
    split = stage_table(plan(None, 1, 4, tensor={"size": 4, "levels": [1]})).splitlines()
    assert split == stage_table(plan(None, 1, 4)).splitlines()

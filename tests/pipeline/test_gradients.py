"""Flat gradients beyond the ladder's comparisons: messages, memory, loss scales, parameters without gradient.

As a script, with a file of cases and a folder for its reports, this trains each case on real ranks.
"""

import hashlib
import unittest.mock
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import bf16_optimizer

from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline import engine as engine_module
from ddpm_ds.pipeline.gradients import SUMMED, FlatGradients, _match, norm_of
from tests.launching import tiny_spec
from tests.pipeline.batches import global_batch, micro_batches
from tests.pipeline.ladder_worker import Case, Precision, compile_without_code, report_cases, run_cases, spec_of
from tests.pipeline.test_synchronisation import Poisoned

SPEC = tiny_spec(unet={"multipliers": [1], "attention_resolutions": []})


def test_a_place_gets_the_strides_of_its_gradient_where_the_memory_is_in_the_same_order() -> None:
    flat = torch.zeros(24)
    places = [flat.narrow(0, 0, 12).view(4, 1, 1, 3), flat.narrow(0, 12, 12).view(4, 3)]
    gradients = [torch.ones(12).as_strided((4, 1, 1, 3), (3, 7, 5, 1)), torch.arange(12.0).view(3, 4).t()]
    _match(places, gradients)
    assert places[0].stride() == gradients[0].stride() and places[1].stride() == (3, 1)
    torch._foreach_add_(places, gradients)
    assert torch.equal(flat, torch.cat([gradient.flatten() for gradient in gradients]))


def test_the_norm_of_millions_of_gradients_is_exact_to_the_sixth_digit() -> None:
    gradients = torch.randn(2**23 + 5, generator=torch.Generator().manual_seed(0))
    assert norm_of(gradients.split(SUMMED)).item() == pytest.approx(gradients.double().norm().item(), rel=1e-6)


def found(folder: Path, name: str, *arguments: Any, processes: int = 1) -> list[Any]:
    """Values that a function below returns, by rank."""
    reports = run_cases(processes, Path(__file__), [[name, *arguments]], folder)
    return [report for (report,) in reports]


@pytest.mark.launch
@pytest.mark.parametrize("zero", [0, 2])
def test_the_loss_scale_moves_and_steps_are_skipped_alike_whoever_decides_it(zero: int, tmp_path: Path) -> None:
    """The host, or a fused Adam. The scale grows every second step, overflows twice, and falls to its floor."""
    ((flat, fused),) = found(tmp_path, "scales", zero)
    assert flat == fused
    skipped, at_floor = [step["skipped"] for step in flat], [step["at_floor"] for step in flat]
    assert skipped[-1] == len(BAD_STEPS) and max(at_floor) > 1, flat


@pytest.mark.launch
def test_replicas_without_zero_clip_alike_in_whatever_order_their_reductions_add_up(tmp_path: Path) -> None:
    """Three stages and two replicas, one of which rounds sums over its stages to the next number."""
    ranks = found(tmp_path, "steps_with_planted_rounding", processes=6)
    assert len({tuple(norms) for _, norms, _ in ranks}) == 1, ranks
    for stage in range(3):
        assert len({digest for own, _, digest in ranks if own == stage}) == 1, ranks


@pytest.mark.launch
def test_a_parameter_without_gradient_is_an_error_and_not_a_bucket_without_it(tmp_path: Path) -> None:
    ((message, shape),) = found(tmp_path, "froze")
    assert message == f"1 parameters got no gradient, one of shape {tuple(shape)}"


@pytest.mark.launch
@pytest.mark.capability
def test_a_step_in_host_memory_has_the_bits_of_one_on_the_device(tmp_path: Path) -> None:
    """Where both are a CPU; one step of fp16 overflows."""
    cases = [["bits", zero, precision] for zero, precision in ((1, "bf16"), (2, "fp16"), (1, "fp32"))]
    (reports,) = run_cases(1, Path(__file__), cases, tmp_path)
    for (resident, offloaded), skipped in zip(reports, (0, 1, 0), strict=True):
        assert resident == offloaded and len({digest for *_, digest in resident}) == len(resident) - skipped


@pytest.mark.launch
def test_the_first_step_of_each_order_of_image_sizes_sends_its_messages_by_the_hosts(tmp_path: Path) -> None:
    first, second = found(tmp_path, "ways_of_messages", processes=2)
    assert first == second == [True, True, True, False, False, False, True]


@pytest.mark.launch
def test_a_backward_waits_for_no_average_where_the_sum_has_memory_for_all(tmp_path: Path) -> None:
    """ZeRO-1's sum has, also for chunks in 16 bits; ZeRO-2 has two buffers. No two chunks under way share memory."""
    for own in found(tmp_path, "most_under_way", processes=2):
        for name, (chunks, most, shares) in own.items():
            assert chunks > 4 and not shares, (name, own)
            assert most == (2 if name == "ZeRO-2" else chunks), (name, own)


# -------------------------------------------------------------------------------- the ranks


def most_under_way() -> dict[str, tuple[int, int, bool]]:
    """Chunks, the most of them under way in a step, and whether two of these ever shared memory."""
    cases = {
        "ZeRO-1": Case(1, 2, 1, "fp32", 0, micro_batches=1),
        "ZeRO-1, 16 bits": Case(1, 2, 1, "fp16", 0, micro_batches=2, fp32_accumulation=True),
        "ZeRO-2": Case(1, 2, 2, "fp32", 0, micro_batches=1),
    }
    return {name: counted_under_way(case) for name, case in cases.items()}


def counted_under_way(case: Case) -> tuple[int, int, bool]:
    engine = case.engine(SPEC, zero_optimization={"stage": case.zero, "reduce_bucket_size": 1})
    gradients = engine.gradients
    assert isinstance(gradients, FlatGradients)
    average, under_way, counts, shares = gradients._replicas.average, list[tuple[int, int]](), [0], False

    def counted(whole: torch.Tensor, part: torch.Tensor) -> Any:
        nonlocal shares
        own, averaged = (whole.data_ptr(), whole.data_ptr() + whole.nbytes), average(whole, part)
        shares |= any(start < own[1] and own[0] < stop for start, stop in under_way)
        under_way.append(own)
        counts.append(len(under_way))

        def finish() -> None:
            averaged()
            under_way.remove(own)

        return finish

    with unittest.mock.patch.object(gradients._replicas, "average", counted):
        engine.train_batch(micro_batches(engine, global_batch(SPEC, 0)))
    assert not under_way
    engine.destroy()
    return len(gradients._chunks), max(counts), shares


def ways_of_messages() -> list[bool]:
    """Whether each step sends its messages by the hosts, with three orders of image sizes, by the step."""
    spec = spec_of(compiled=False, process="buckets")
    engine = Case(2, 1, 1, "fp32", 0, process="buckets").engine(spec)
    execute, ways = engine.execute_program, list[bool]()

    def executed(*, by_host: bool, **others: Any) -> Any:
        ways.append(by_host)
        return execute(by_host=by_host, **others)

    with unittest.mock.patch.object(engine_module, "runs_behind", lambda device: True):
        for step in (0, 0, 1, 0, 1, 0, 2):
            engine.images_seen = step * spec.train.batch_images
            with unittest.mock.patch.object(engine, "execute_program", executed):
                engine.train_batch(micro_batches(engine, global_batch(spec, step)))
    engine.destroy()
    return ways


BAD_STEPS = (1, 2, 4, 5, 6, 7, 8)


def scales(zero: int) -> list[list[dict[str, Any]]]:
    """The courses of the loss scale that the host and a fused Adam decide."""
    own = Case(1, 1, zero, "fp16", 0, micro_batches=1)
    return [course_of_scale(way) for way in (own, replace(own, fused=True))]


def course_of_scale(case: Case) -> list[dict[str, Any]]:
    """Loss scaler, skipped steps and overflows at the floor after each step; some steps overflow."""
    fp16 = {"enabled": True, "initial_scale_power": 1, "loss_scale_window": 2, "min_loss_scale": 1}
    engine = case.engine(SPEC, fp16=fp16)
    objective, poisoned, steps = engine.objective, Poisoned(engine.objective), []
    for step in range(BAD_STEPS[-1] + 2):
        engine.objective = poisoned if step in BAD_STEPS else objective
        engine.train_batch(micro_batches(engine, global_batch(SPEC, step)))
        scaler = engine.gradients.scaler_state()
        stable = int(scaler["cur_iter"] - scaler["last_overflow_iter"]) - 2  # DeepSpeed does not forget what it grew by
        steps.append(
            {
                "scale": scaler["cur_scale"],
                "hysteresis": scaler.get("cur_hysteresis", 1),
                "stable": stable % 2 if stable > 0 else stable,
                "skipped": engine.count_skipped_steps(),
                "at_floor": engine.gradients.overflows_at_floor(),
            }
        )
    engine.destroy()
    return steps


def bits(zero: int, precision: Precision) -> list[list[list[Any]]]:
    """The courses of an optimizer on the device and in host memory."""
    own = Case(1, 1, zero, precision, 0, micro_batches=2, fused=True)
    return [course_of_bits(own), course_of_bits(replace(own, offload=True))]


def course_of_bits(case: Case) -> list[list[Any]]:
    """Loss, norm, skips and a checksum of the masters after each of some steps; in fp16 the second overflows."""
    engine = case.engine(SPEC)
    engine.rate = lambda *_: 2.0**-10  # the same number in fp32, as on a device
    objective, rows = engine.objective, []
    for step in range(3):
        engine.objective = Poisoned(objective) if case.precision == "fp16" and step == 1 else objective
        loss = engine.train_batch(micro_batches(engine, global_batch(SPEC, step))).item()
        (master,) = insides.masters(engine)
        digest = hashlib.sha256(master.detach().numpy().data).hexdigest()
        rows.append([repr(loss), repr(engine.gradients.norm()), engine.count_skipped_steps(), digest])
    engine.destroy()
    return rows


def steps_with_planted_rounding() -> tuple[int, list[str], str]:
    """Stage, norms of some steps, and a checksum of the weights."""
    engine = Case(3, 2, 0, "fp32", 0, micro_batches=2).engine(SPEC, gradient_clipping=1e-3)
    reduce: Any = torch.distributed.all_reduce
    stages = engine.grid.get_model_parallel_group()

    def rounding(tensor: torch.Tensor, *others: Any, group: Any = None, **more: Any) -> Any:
        work = reduce(tensor, *others, group=group, **more)
        if group is stages and engine.grid.get_data_parallel_id() == 1:
            tensor.copy_(tensor.nextafter(2 * tensor))
        return work

    norms = []
    with unittest.mock.patch.object(torch.distributed, "all_reduce", rounding):
        for step in range(3):
            engine.train_batch(micro_batches(engine, global_batch(SPEC, step)))
            norms.append(repr(engine.gradients.norm()))
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in engine.module.parameters())).hexdigest()
    stage = engine.stage_id
    engine.destroy()
    return stage, norms, digest


def froze() -> tuple[str, list[int]]:
    """The error of a step in which a parameter gets no gradient, and the parameter's shape."""
    engine = Case(1, 1, 2, "fp32", 0, micro_batches=1).engine(SPEC)
    engine.train_batch(micro_batches(engine, global_batch(SPEC, 0)))
    frozen = list(engine.module.parameters())[5].requires_grad_(False)
    with pytest.raises(RuntimeError) as error:
        engine.train_batch(micro_batches(engine, global_batch(SPEC, 1)))
    return str(error.value), list(frozen.shape)


if __name__ == "__main__":
    compile_without_code()
    with unittest.mock.patch.object(bf16_optimizer, "see_memory_usage"):  # collects garbage, for seconds
        report_cases(lambda case: globals()[case[0]](*case[1:]))

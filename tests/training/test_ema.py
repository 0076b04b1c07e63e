"""Averages of weights in host memory, beside those on the device."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpm_ds.config.spec import EmaSpec
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.training import ema as ema_module
from ddpm_ds.training.ema import Ema, HostEma, averages_of

STEPS, BATCH = 5, 16


def engine_of(*sizes: int, offloads: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    optimizer = SimpleNamespace(param_groups=[{"params": masters}])
    wrapper, gradients = SimpleNamespace(cpu_offload=offloads), SimpleNamespace(refresh_weights=lambda: None)
    cpu = torch.device("cpu")
    return SimpleNamespace(basic_optimizer=optimizer, optimizer=wrapper, gradients=gradients, device=cpu)


def trained(engine: Any, ema: Ema) -> list[Tensor]:
    """The averages after some steps, taken without a look at them."""
    masters = insides.masters(engine)
    for step in range(1, STEPS + 1):
        ema.begin_step(step * BATCH, BATCH)
        with ema.stepping():
            for master in masters:
                master.add_(torch.sin(step * torch.arange(len(master))))
        ema.begin_step(step * BATCH, 0)  # a trial of a graph, which ends no step
        ema.begin_step(step * BATCH, BATCH)
        ema.end_step()
    return [average.clone() for average in ema.shadows]


@pytest.mark.parametrize("piece", [64, 2**26])
@pytest.mark.parametrize("sizes", [(1000,), (100, 7, 300)])
def test_a_slow_host_has_the_bits_of_the_device(
    sizes: tuple[int, ...], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ema_module, "PIECE", piece)
    spec = EmaSpec(halflife_images=40, rampup_fraction=0.5, on_host=True)
    update = HostEma._update_copied

    def slow(ema: HostEma, weight: Tensor) -> None:
        time.sleep(0.05)  # the weights of the next step are there meanwhile
        update(ema, weight)

    monkeypatch.setattr(HostEma, "_update_copied", slow)
    (here, there) = (engine_of(*sizes), engine_of(*sizes))
    on_host = averages_of(there, spec)
    assert isinstance(on_host, HostEma)
    wanted, found = trained(here, Ema(here, spec)), trained(there, on_host)
    assert len(found) == len(sizes)
    assert all(map(torch.equal, wanted, found)) and not torch.equal(wanted[0], insides.masters(here)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_host", [True, False])
def test_weights_and_averages_are_as_before_once_the_averages_were_used(
    on_host: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averages of weights in 16 bits are in fp32, and rounded where they are used."""
    monkeypatch.setattr(ema_module, "PIECE", 32)
    engine = engine_of(50, 20, dtype=dtype)
    ema = averages_of(engine, EmaSpec(on_host=on_host))
    if isinstance(ema, HostEma):
        locked = {new.untyped_storage().data_ptr(): new.untyped_storage().nbytes() for new in ema._new}
        assert [size // dtype.itemsize for size in locked.values()] == [32, 32, 6], "PyTorch page-locks powers of two"
    averages = trained(engine, ema)
    assert {average.dtype for average in averages} == {torch.float32}
    weights = [master.clone() for master in insides.masters(engine)]
    for _ in range(2):
        with ema.applied():
            assert all(map(torch.equal, insides.masters(engine), (average.to(dtype) for average in averages)))
        assert all(map(torch.equal, insides.masters(engine), weights))
        assert all(map(torch.equal, ema.shadows, averages))


def test_an_error_of_the_host_thread_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(HostEma, "_update_copied", fail)
    engine = engine_of(5)
    with pytest.raises(RuntimeError, match="no memory"):
        trained(engine, averages_of(engine, EmaSpec(on_host=True)))


def test_with_offload_averages_are_where_the_weights_are() -> None:
    assert type(averages_of(engine_of(5, offloads=True), EmaSpec(on_host=True))) is Ema
    assert type(averages_of(engine_of(5), EmaSpec())) is Ema

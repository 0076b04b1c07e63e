"""From a row's name to the row."""

from __future__ import annotations

from ddpm_ds.benchmark.rows import Row, Setting
from ddpm_ds.benchmark.rows_deepspeed import OurPipeline, TracedPipeline, ZeroWithoutPipeline
from ddpm_ds.benchmark.rows_pipelining import TorchPipeline
from ddpm_ds.benchmark.rows_pytorch import DataParallel, PlainLoop
from ddpm_ds.benchmark.rows_stock import StockPipeline


def build_row(name: str, setting: Setting) -> Row:
    """The row with a name of :data:`ddpm_ds.benchmark.choice.ROWS`; every process calls this."""
    match name:
        case "plain":
            return PlainLoop(setting)
        case "1f1b":
            return OurPipeline(setting, "1f1b")
        case "folded":
            return OurPipeline(setting, "folded")
        case "traced":
            return TracedPipeline(setting)
        case "stock":
            return StockPipeline(setting, default_cuts=False)
        case "stock-default":
            return StockPipeline(setting, default_cuts=True)
        case "torch":
            return TorchPipeline(setting)
        case "ddp":
            return DataParallel(setting)
        case "zero2":
            return ZeroWithoutPipeline(setting)
    raise ValueError(f"no row is named {name}")

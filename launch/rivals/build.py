"""From a row's name to the row."""

from __future__ import annotations

from ddpm_ds.train.setting import Setting
from rivals.rows import Row
from rivals.rows_deepspeed import OurPipeline, TracedPipeline, ZeroWithoutPipeline
from rivals.rows_pipelining import TorchPipeline
from rivals.rows_pytorch import DataParallel, PlainLoop
from rivals.rows_stock import StockPipeline


def build_row(name: str, setting: Setting) -> Row:
    """The row with a name of :data:`rivals.choice.ROWS`; every process calls this."""
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

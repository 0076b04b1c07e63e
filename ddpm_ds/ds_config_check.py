"""What is wrong with a DeepSpeed JSON before any spec is known: key by key, then keys together."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpm_ds.ds_config_keys import KEYS, OFF, children
from ddpm_ds.ds_config_kinds import BLOCK, Effect, Key, same
from ddpm_ds.errors import DsConfigError

_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
SCHEDULER_PARAMS: dict[str, tuple[str, ...]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": (*_WARMUP, "total_num_steps"),
    "WarmupCosineLR": ("warmup_min_ratio", *_WARMUP[2:], "total_num_steps", "cos_min_ratio"),
}


def check_ds_config(config: dict[str, Any], path: Path | str) -> None:
    """Refuse what is unknown, misspelt, wrongly typed, ignored or broken under a pipeline (docs/ds_configs.md).

    Raises :class:`DsConfigError`, one line naming file, key, value and fix.
    """
    try:
        _check_block(config, "")
        _check_together(config)
    except DsConfigError as error:
        raise DsConfigError(f"{path}: {error}") from None


def enabled(config: dict[str, Any], block: str) -> bool:
    """Whether a block of a checked config is switched on."""
    return bool(config.get(block, {}).get("enabled", False))


def zero_stage(config: dict[str, Any]) -> int:
    """ZeRO stage of a checked config; 0 is off."""
    return int(config.get("zero_optimization", {}).get("stage", 0))


def shown(value: Any) -> str:
    """A JSON value, shortened to fit a line."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_block(block: dict[str, Any], prefix: str) -> None:
    for name, value in block.items():
        dotted = f"{prefix}{name}"
        key = KEYS.get(dotted)
        if key is None:
            raise DsConfigError(_unknown(name, prefix))
        if key.effect is Effect.REFUSED:
            if not _is_inert(value, key):
                raise DsConfigError(f"{dotted} = {shown(value)} is refused: {key.note}")
        elif value == "auto":
            if not key.auto:
                raise DsConfigError(f'{dotted} = "auto" should be {key.kind.words}; nothing fills it')
        elif not key.kind.accepts(value):
            why = f"; {key.why}" if key.why else ""
            auto = ' or "auto"' if key.auto else ""
            raise DsConfigError(f"{dotted} = {shown(value)} should be {key.kind.words}{auto}{why}")
        elif key.kind is BLOCK:
            _check_block(value, f"{dotted}.")


def _is_inert(value: object, key: Key) -> bool:
    off = OFF in key.inert and isinstance(value, dict) and value.get("enabled") is False
    return off or any(same(value, inert) for inert in key.inert)


def _unknown(name: str, prefix: str) -> str:
    known = children(prefix.removesuffix("."))
    near = difflib.get_close_matches(name, known, n=1)
    elsewhere = [dotted for dotted in KEYS if dotted.rpartition(".")[2] == name]
    if near or elsewhere:
        return f"{prefix}{name} is unknown; did you mean {prefix + near[0] if near else elsewhere[0]}?"
    return f"{prefix}{name} is unknown to DeepSpeed and to this project; remove it"


def _check_together(config: dict[str, Any]) -> None:
    """What no key alone can know."""
    if enabled(config, "fp16") and enabled(config, "bf16"):
        raise DsConfigError("fp16.enabled and bf16.enabled are both true; switch one off")
    stage = zero_stage(config)
    half = enabled(config, "fp16") or enabled(config, "bf16")
    if stage == 0:
        for dotted, value in _given_keys(config):
            if KEYS[dotted].zero_only and value != "auto":
                raise DsConfigError(
                    f"{dotted} = {shown(value)} has no effect without ZeRO; remove it or set zero_optimization.stage "
                    f"to 1 or 2"
                )
        if enabled(config, "fp16") and config["fp16"].get("hysteresis", 1) != 1:
            raise DsConfigError(
                f"fp16.hysteresis = {config['fp16']['hysteresis']} is ignored without ZeRO; write 1 or set "
                f"zero_optimization.stage to 1 or 2"
            )
    if "grad_accum_dtype" in config.get("data_types", {}) and not half:
        raise DsConfigError("data_types.grad_accum_dtype has no effect in fp32; remove it")
    if "type" not in config.get("optimizer", {}):
        raise DsConfigError('optimizer.type is missing; write "optimizer": {"type": "AdamW", "params": {...}}')
    params = config["optimizer"].get("params", {})
    for variant in ("fused", "foreach"):
        if params.get(variant) and not params.get("torch_adam"):
            raise DsConfigError(f"optimizer.params.{variant} is PyTorch's; it needs torch_adam = true, or remove it")
    if params.get("fused") and params.get("foreach"):
        raise DsConfigError("optimizer.params.fused and foreach are both true; keep one")
    if "scheduler" in config:
        kind = config["scheduler"].get("type")
        if kind is None:
            raise DsConfigError('scheduler.type is missing; write "type": "WarmupLR" or remove the scheduler')
        for name in config["scheduler"].get("params", {}):
            if name not in SCHEDULER_PARAMS[kind]:
                raise DsConfigError(f"scheduler.params.{name} is not a setting of {kind}; remove it")


def _given_keys(block: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in block.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict) and KEYS[f"{prefix}{name}"].kind is BLOCK:
            yield from _given_keys(value, f"{prefix}{name}.")

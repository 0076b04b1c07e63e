"""The verdict on a run that is over, from its folder and into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ddpm_ds.errors import UserError
from ddpm_ds.verdict.device import Device, measure_device, write_device
from ddpm_ds.verdict.facts import HOW_TO_TRACE, SUMMARY, Facts, facts_of
from ddpm_ds.verdict.verdict import Verdict, text, verdict

VERDICT = "verdict.txt"
"""In a run's folder."""


def conclude(run_dir: Path, say: Callable[[str], None]) -> Verdict | None:
    """Judge a run at its end, on rank 0: measure its device, write ``verdict.txt``, and return what was found.

    Takes some tenths of a second. None, which ``say`` explains, where no step was traced or the run's files can't be
    read or written.
    """
    if not (run_dir / SUMMARY).is_file():
        say(f"no verdict: no step was traced; {HOW_TO_TRACE}")
        return None
    try:
        facts = facts_of(run_dir)
        device = _measured(facts)
        found = verdict(replace(facts, device=device))
        write_device(run_dir, device)
        (run_dir / VERDICT).write_text(text(found))
    except UserError as error:
        say(f"no verdict: {error}")
    except OSError as error:
        say(f"no verdict: {run_dir} can't be written ({error.strerror})")
    else:
        return found
    return None


def _measured(facts: Facts) -> Device:
    device = torch.device("cpu" if facts.on_cpu else "cuda")
    return measure_device(facts.layers, device, facts.precision)

"""A trained regression, of whose predictions a cache of residuals is made (:mod:`ddpm_ds.data.fields`)."""

import numpy as np
import numpy.typing as npt
import torch

from ddpm_ds.config.choices import OBJECTIVES
from ddpm_ds.config.spec import ConditionSpec, DataSpec, written
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.errors import SpecError
from ddpm_ds.evaluate.inputs import Inputs
from ddpm_ds.evaluate.trained import load_trained

CONDITION_KEYS = ("kind", "variables", "channels", "constants", "constant_channels", "vector", "vector_size")
"""Keys of the condition that a regression and the run on its residuals must have in common."""


class TrainedRegression:
    """Implements :class:`ddpm_ds.data.fields.Regression` for the averaged weights of a run.

    Raises:
        CheckpointError: ``data.residual_of`` has no weights.
        SpecError: it is no regression, or one of other fields than ``data``.
    """

    def __init__(self, data: DataSpec, device: torch.device) -> None:
        assert data.residual_of is not None, "the caller has set it"
        path = data.residual_of
        self._trained = load_trained(path, device=device)
        self.digest = self._trained.digest
        """Checksum of the weights."""
        objective = self._trained.diffusion.objective
        if self._trained.spec is None or OBJECTIVES[objective].diffuses:
            raise SpecError(
                f"data.residual_of = {path} is no regression: its diffusion.objective is {objective}; name a run with "
                "diffusion.objective = regression"
            )
        its, asked = _compared(self._trained.data), _compared(data)
        for key, value in asked.items():
            if its[key] != value:
                raise SpecError(
                    f"data.residual_of = {path} has {key} = {its[key]}, and this spec {value}; name a regression of "
                    "the same fields"
                )

    def predict(self, fields: DatasetCache, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the fields (n, C, H, W) that it predicts at ``positions`` (n,) of a cache, in their units."""
        if (facts := self._trained.facts) is not None:
            fields = fields.with_statistics(facts.statistics)  # masked values are read as in its training
        inputs = Inputs(self._trained, fields.fields, positions, key="")
        found: npt.NDArray[np.float32] = inputs.predicted(range(len(positions))).numpy()
        return found


def _compared(data: DataSpec) -> dict[str, object]:
    """Return what a regression and the run on its residuals must have in common."""
    condition = data.condition or ConditionSpec()
    return {
        "data.channels": data.channels,
        "data.image_size": written(data.size),
        "data.variables": _listed(data.variables),
        **{f"data.condition.{key}": _listed(getattr(condition, key)) for key in CONDITION_KEYS},
    }


def _listed(value: object) -> object:
    """Return a value as a spec may say it."""
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else value

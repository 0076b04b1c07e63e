"""A file of Inception weights drawn at random: its features are as good as any for comparing programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def write_weights(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file that torch-fidelity accepts in place of the real weights, which are a download."""
    from torch_fidelity import feature_extractor_inceptionv3 as inception

    network = inception.FeatureExtractorInceptionV3
    with monkeypatch.context() as patch, torch.random.fork_rng():
        patch.setattr(inception, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(network, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        state = network("inception-v3-compat", ["64"]).state_dict()
    torch.save(state, path)
    return path

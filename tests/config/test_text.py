"""What a spec of captions may not ask for is refused in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ddpm_ds.config.spec import RunSpec
from tests.launching import tiny_spec


def captioned(data: dict[str, Any], **text: Any) -> RunSpec:
    """A spec of captions."""
    read = {"context_channels": 8, "blocks": [0, 1], "heads": [1, 1], **text}
    files = {"source": "folder", "path": Path("pictures"), "text": {"encoders": "encoders"}}
    return tiny_spec(data=files | data, unet={"attention_resolutions": [], "text": read})


def test_sources_without_captions_are_refused() -> None:
    assert captioned({}).data.text is not None
    said = r"data\.source = digits has no captions for data\.text; use one of folder, webdataset, huggingface"
    with pytest.raises(ValidationError, match=said):
        captioned({"source": "digits", "path": None})


def test_random_crops_are_refused_where_the_unet_is_told_of_the_crop() -> None:
    assert captioned({"crop_from": 10}).data.crop_from == 10
    with pytest.raises(ValidationError, match=r"data\.crop_from = 10 crops elsewhere each time"):
        captioned({"crop_from": 10}, pooled_channels=4)

"""What a spec of captions may not ask for is refused in a line."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.launching import tiny_spec


@pytest.mark.parametrize("key", ["multipliers", "attention_levels", "attention_resolutions", "blocks", "heads"])
def test_every_list_of_the_unet_is_answered_at_any_length(key: str) -> None:
    """In one line each, by the number of levels that it has to fit; depths of 64 make too many layers."""
    for length in range(1, 15):
        for value in (0, 1, 8, 64):
            lists: dict[str, Any] = {key: [value] * length}
            text = {"context_channels": 8, "blocks": [0, 1], "heads": [1, 1]} | lists
            of_text = {"text": {name: text[name] for name in ("context_channels", "blocks", "heads")}}
            unet: dict[str, Any] = {"attention_resolutions": []} | (
                of_text if key in ("blocks", "heads") else of_text | lists
            )
            data = {"source": "folder", "path": Path("pictures"), "text": {"encoders": "encoders"}}
            for given, images in ((unet, data), ({**unet, "text": None}, {**data, "text": None})):
                try:
                    assert len(tiny_spec(data=images, unet=given).unet.multipliers) == (length if key[0] == "m" else 2)
                except ValidationError as error:
                    faults = error.errors()
                    assert all(len(str(fault["msg"])) < 500 for fault in faults)
                    if key in ("blocks", "heads") and length != 2 and value in (1, 8):
                        said = f"unet.text.{key} = {[value] * length} has {length} numbers, and unet.multipliers has 2"
                        assert said in str(error) and given["text"]

"""CLIP score: how well drawn images fit their prompts, by a CLIP model (extra ``text``).

It is 100 times the cosine of the embeddings of image and prompt, and 0 where that is negative, as torchmetrics defines
it. Source: Hessel et al. 2021, "CLIPScore", who multiply by 2.5 instead.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddpm_ds.data.hub import from_hub
from ddpm_ds.data.sources.base import one_line
from ddpm_ds.errors import DataError
from ddpm_ds.evaluate.inception import Array, Pixels
from ddpm_ds.files import read_json

EXPECTED = "name the folder of a CLIPModel with its processor, or its name on the hub: openai/clip-vit-large-patch14"
DOWNLOADED = ("*.json", "merges.txt", "*.safetensors")
TOKENIZERS = ("tokenizer.json", "vocab.json")
AT_ONCE = 32
"""Images that are embedded together."""
COLOURS = 3


class Clip:
    """CLIP model with its processor, of which the weights are loaded at the first use.

    Raises:
        DataError: by all, if transformers is not installed, or the model is missing, damaged or of another kind.
    """

    def __init__(self, name: Path) -> None:
        """Open the model in the folder ``name``, or of that name on the Hugging Face hub."""
        self.name = str(name)
        said = f"--clip-model {name}"
        if importlib.util.find_spec("transformers") is None:
            raise DataError(f"{said} needs transformers: pip install 'ddpm_ds[text]'")
        if name.exists():
            self._open(name)
        else:
            from_hub(self.name, DOWNLOADED, self._open, said=said, expected=EXPECTED)

    def scores(self, images: Pixels, prompts: Sequence[str], device: torch.device) -> Array:
        """Return the score (N,) of each of the images (N, C, H, W), which show the ``prompts`` in turn.

        What a prompt has beyond the model's tokens is cut off.
        """
        model = self._model().to(device)
        found = []
        for first in range(0, len(images), AT_ONCE):
            part = torch.from_numpy(np.array(images[first : first + AT_ONCE]))
            texts = [prompts[number % len(prompts)] for number in range(first, first + len(part))]
            inputs = self._processor(
                text=texts,
                images=[*part.expand(-1, COLOURS, -1, -1)],
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=model.config.text_config.max_position_embeddings,
            ).to(device)
            with torch.no_grad():
                drawn = model(**inputs)
            cosine = (drawn.image_embeds * drawn.text_embeds).sum(dim=-1)  # of unit length
            found.append(100.0 * cosine.clamp(min=0.0).double().cpu())
        return torch.cat(found).numpy()

    def _open(self, folder: Path) -> None:
        import transformers

        transformers.logging.set_verbosity_error()  # the errors below replace its warnings
        transformers.logging.disable_progress_bar()
        self._folder = folder
        with self._faults():
            if read_json(folder / "config.json").get("model_type") != "clip" or not any(folder.glob("*.safetensors")):
                raise ValueError("it is no CLIP model with weights in safetensors")
            if not any((folder / name).is_file() for name in TOKENIZERS):  # transformers would make an empty one
                raise ValueError(f"it has neither {' nor '.join(TOKENIZERS)}")
            self._processor = transformers.CLIPProcessor.from_pretrained(folder, local_files_only=True)

    def _model(self) -> Any:
        import transformers

        how: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
        with self._faults():
            found: Any = transformers.CLIPModel.from_pretrained(self._folder, dtype=torch.float32, **how)
            model, notes = found
            if missing := sorted(notes["missing_keys"]):
                raise ValueError(f"its weights lack {missing[0]}")
        return model.eval()

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # transformers may raise anything on damaged files
            raise DataError(f"--clip-model {self.name} can't be used ({one_line(error)}); {EXPECTED}") from None

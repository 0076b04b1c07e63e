"""The arguments of a class of diffusers, as a JSON configuration holds them, read with care for types and ranges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

LONGEST_VALUE = 80


class Arguments(BaseModel):
    """Arguments with diffusers' defaults; the types of a subclass are what we can express.

    Keys that begin with an underscore are diffusers' own notes and are not arguments.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    class_names: ClassVar[tuple[str, ...]]
    """Classes whose arguments these are."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """The arguments in a configuration.

        Raises:
            ValueError: with the key, its value and what can be expressed, in one line.
        """
        name = config.get("_class_name", cls.class_names[0])
        if name not in cls.class_names:
            raise refused("_class_name", name, f"only {' or '.join(cls.class_names)} can be read")
        arguments = {key: value for key, value in config.items() if not key.startswith("_")}
        try:
            # By JSON's rules a list is a tuple, yet "64" is no number.
            return cls.model_validate_json(json.dumps(arguments))
        except ValidationError as error:
            problem = error.errors()[0]
            key = str(problem["loc"][0])
            raise refused(key, config[key], problem["msg"].replace("Input should be", "it should be")) from None


def refused(key: str, value: Any, why: str) -> ValueError:
    """The error of a key whose value can't be expressed."""
    text = json.dumps(value)
    return ValueError(f"{key} = {text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + '...'}: {why}")

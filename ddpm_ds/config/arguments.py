"""Arguments of the functions that scripts call, checked against their annotations. Does not import torch."""

import builtins
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from ddpm_ds.config.section import expected, shown
from ddpm_ds.errors import SpecError

P = ParamSpec("P")
T = TypeVar("T")


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` with its arguments checked, and converted as pydantic does, before it runs.

    Ranges are in the annotations, such as ``Annotated[int, Field(ge=1)]``. The function raises SpecError, one line that
    names the argument, its value and what it takes.
    """
    signature = inspect.signature(function)

    @functools.cache  # made at the first call, since it takes milliseconds
    def model() -> type[BaseModel]:
        names = _Names(vars(builtins) | vars(inspect.getmodule(function)))
        hints = get_type_hints(function, localns=names, include_extras=True)
        fields: dict[str, Any] = {name: (hints[name], None) for name in signature.parameters}
        config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
        return create_model(function.__name__, __config__=config, **fields)

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        bound = signature.bind(*args, **options)
        try:
            given = model().model_validate(bound.arguments)
        except ValidationError as error:
            raise SpecError(f"{function.__name__}: {_said(error, bound.arguments, model())}") from None
        bound.arguments.update({name: getattr(given, name) for name in bound.arguments})
        return function(*bound.args, **bound.kwargs)

    return call


def _said(error: ValidationError, arguments: Mapping[str, Any], model: type[BaseModel]) -> str:
    problem = error.errors()[0]
    name, *within = map(str, problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":  # from a check of our own, already one line
        return message
    if problem["type"] == "rule":
        return f"{name} = {shown(arguments[name])} {message}"
    if isinstance(arguments[name], BaseModel) and within:  # a spec that was changed without being checked
        return f"{'.'.join([name, *within])} = {shown(problem['input'])}: {message[:1].lower()}{message[1:]}"
    field = model.model_fields[name]
    alone: dict[str, Any] = {name: (field.annotation, field)}  # the schema of all arguments takes ten times as long
    schema = create_model(model.__name__, __config__=model.model_config, **alone).model_json_schema(
        schema_generator=_Words
    )
    takes = expected(schema["properties"][name])
    return f"{name} = {shown(arguments[name])} should be {takes}"


class _Names(dict[str, Any]):
    """Names in annotations. One that is imported for type checkers alone stands for any type."""

    def __missing__(self, name: str) -> Any:
        return Any


class _Words(GenerateJsonSchema):
    """Schema that has words for the types that JSON lacks."""

    def is_instance_schema(self, schema: Any) -> JsonSchemaValue:
        return {"type": f"a {schema['cls'].__name__}"}

    def callable_schema(self, schema: Any) -> JsonSchemaValue:
        return {"type": "a function"}

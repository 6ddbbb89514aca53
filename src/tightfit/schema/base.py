"""Base class of all records: frozen, validated once when built, converted to and from JSON and YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from tightfit.errors import InputError, PlanError, unknown_name
from tightfit.files import read_regular
from tightfit.units import parse_bytes

__all__ = ["Count", "Positive", "Rate", "Real", "Record", "Size"]

Count = Annotated[int, Strict(), Field(ge=0)]  # strict: a bool is not accepted as a number
Positive = Annotated[int, Strict(), Field(gt=0, lt=2**63)]  # beyond, torch takes none, and a float not always
Real = Annotated[float, Strict(), Field(ge=0)]
Rate = Annotated[float, Strict(), Field(gt=0)]


def _whole_bytes(size: object) -> object:
    """Convert text ("8GB") and integral floats (8e9) to int bytes; return anything else unchanged for validation."""
    if isinstance(size, str):
        return parse_bytes(size)
    return int(size) if isinstance(size, float) and size.is_integer() else size


Size = Annotated[Positive, BeforeValidator(_whole_bytes)]


class Record(BaseModel):
    """A frozen pydantic model. Validation errors are raised as `error`, or as another class of `tightfit.errors`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    error: ClassVar[type[InputError]] = PlanError

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise self._explain(error) from None

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_mapping(), sort_keys=True))  # dict fields are not hashable

    @classmethod
    def from_mapping(cls, fields: object) -> Self:
        """Return the record with these fields. Raises `error` (PlanError, RequestError) if they are invalid."""
        if not isinstance(fields, Mapping) or not all(isinstance(key, str) for key in fields):
            raise cls.error(f"a {cls.__name__.lower()} is a mapping of fields to values, not {fields!r:.60}")
        return cls(**fields)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the record parsed from JSON or YAML. Raises `error` if the text or its fields are invalid."""
        return cls.from_mapping(cls.fields_from_text(text))

    @classmethod
    def fields_from_text(cls, text: str) -> dict[str, Any]:
        """Return the fields in JSON or YAML text, not yet validated. Raises `error` if it is not a mapping."""
        try:
            fields = _parse(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            line = " ".join(str(error).split())
            raise cls.error(f"this is neither JSON nor YAML: {line}") from None
        if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
            raise cls.error(f"a {cls.__name__.lower()} is a mapping of fields to values, not {fields!r:.60}")
        return fields

    @classmethod
    def fields_from_file(cls, path: str | Path) -> dict[str, Any]:
        """Return the fields in a JSON or YAML file, not yet validated. Raises `error` if it cannot be read."""
        try:
            return cls.fields_from_text(read_regular(Path(path)))
        except (OSError, UnicodeDecodeError) as error:
            cause = getattr(error, "strerror", None) or error
            raise cls.error(f"cannot read the {cls.__name__.lower()} {path}: {cause}", path=str(path)) from None

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible Python values."""
        return self.model_dump(mode="json")

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_mapping(), indent=indent)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_mapping(), sort_keys=False, allow_unicode=True)

    @classmethod
    def _explain(cls, error: ValidationError) -> InputError:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        match first["type"]:
            case "extra_forbidden":
                return cls.error(unknown_name(f"field of {cls.__name__}", field, cls.model_fields), field=field)
            case "value_error":
                cause = first["ctx"]["error"]
                if not isinstance(cause, InputError):
                    return cls.error(str(cause), field=field)
                inner = str(cause.facts.get("field", ""))
                if field and inner and str(cause).startswith(inner):  # prefix the path of the nested record's field
                    return type(cause)(f"{field}.{cause}", **cause.facts | {"field": f"{field}.{inner}"})
                return cause
            case "missing":
                return cls.error(f"{field} is missing from {cls.__name__}", field=field)
        given, wanted = first["input"], first["msg"].removeprefix("Input ").replace("should be", "must be")
        return cls.error(f"{field} {wanted}, not {given!r:.60}", field=field, given=repr(given))


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:  # YAML is nearly a superset of JSON, except for tabs and surrogate pairs
        return yaml.safe_load(text)

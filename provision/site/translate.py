"""What pydantic says about values, as problems with keys of the document and the nearest right spelling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from provision.site.problem import Key, Problem, nearest, one_of, shown

_SECRET = ("password", "secret", "token", "passphrase", "webhook", "value")


def translate(error: ValidationError, data: Any, model: type[BaseModel], base: Key = ()) -> list[Problem]:
    """What pydantic says about `data`, as problems below the key `base`; one for each key."""
    by_key: dict[Key, Problem] = {}
    for detail in error.errors(include_url=False):
        problem = _translated(detail, data, model, base)
        earlier = by_key.get(problem.key)
        if earlier is None:
            by_key[problem.key] = problem
        elif earlier.expected and problem.expected and problem.expected not in earlier.expected:
            # several branches of a union
            by_key[problem.key] = Problem(
                earlier.rule,
                earlier.key,
                read=earlier.read,
                expected=f"{earlier.expected}, or {problem.expected}",
                nearest=earlier.nearest or problem.nearest,
                why=earlier.why,
                at_key=earlier.at_key,
            )
    return list(by_key.values())


def _translated(detail: ErrorDetails, data: Any, model: type[BaseModel], base: Key) -> Problem:
    kind, context = detail["type"], detail.get("ctx", {})
    key, value = _walk(data, detail["loc"], missing=kind == "missing")
    here = base + key
    if kind == "extra_forbidden":
        known = [name for fields in _fields_at(model, key[:-1]) for name in fields]
        wrong = str(key[-1])
        close = nearest(wrong, known)
        expected = None if close else one_of(known) if known else "no keys here"
        return Problem("unknown-key", here, read=shown(wrong), expected=expected, nearest=close, at_key=True)
    if kind == "missing":
        return Problem("missing-key", here, why="is missing")
    read = "a value that is not shown" if _is_secret(here) else shown(value)
    if kind == "literal_error":
        allowed = [
            word for word in str(context.get("expected", "")).replace(" or ", ", ").split(", ") if word
        ]
        allowed = [word.strip("'") for word in allowed]
        return Problem(
            "value", here, read=read, expected=one_of(allowed), nearest=nearest(str(value), allowed)
        )
    if kind in ("value_error", "assertion_error"):
        return Problem("value", here, read=read, why=str(context.get("error", detail["msg"])))
    expected = detail["msg"].removeprefix("Input should be ").removeprefix("Input should ")
    expected = expected.replace("valid dictionary or instance of ", "mapping: ").replace(
        "dictionary", "mapping"
    )
    expected = expected.replace("a valid string", "text").split(", unable to parse")[0]
    if kind == "too_short":
        expected = f"at least {context['min_length']}"
    if kind in ("model_type", "dict_type"):
        expected = "a mapping of keys and values"
    return Problem("value", here, read=read, expected=expected)


def _is_secret(key: Key) -> bool:
    return any(word in str(part).lower() for part in key for word in _SECRET)


def _walk(data: Any, location: tuple[int | str, ...], *, missing: bool) -> tuple[Key, Any]:
    """The key in the document that pydantic's `location` means: names of union branches are no keys."""
    key: Key = ()
    for index, part in enumerate(location):
        below = child(data, part)
        if below is None and not _has(data, part) and not (missing and index == len(location) - 1):
            continue
        data, key = below, (*key, part)
    return key, data


def child(data: Any, part: str | int) -> Any:
    """What stands under `part` in a mapping or list; None where there is nothing."""
    if not _has(data, part):
        return None
    return data[part]


def _has(data: Any, part: str | int) -> bool:
    if isinstance(data, list):
        return isinstance(part, int) and part < len(data)
    return isinstance(data, Mapping) and part in data


def _fields_at(model: type[BaseModel], key: Key) -> Iterator[Mapping[str, Any]]:
    """The fields of every model that may stand at `key` below `model`."""
    kinds: list[Any] = [model]
    for part in key:
        kinds = [below for kind in kinds for below in _below(kind, part)]
    for kind in kinds:
        for model_kind in _models(kind):
            yield {field.alias or name: field for name, field in model_kind.model_fields.items()}


def _below(kind: Any, part: str | int) -> Iterator[Any]:
    """The types of what may stand under `part` in a value of type `kind`."""
    for model in _models(kind):
        for name, field in model.model_fields.items():
            if part in (name, field.alias):
                yield field.annotation
    yield from _arguments(kind)


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    elif not isinstance(kind, type) and not _is_container(kind):
        for argument in get_args(kind):
            yield from _models(argument)


def holds_model(kind: Any) -> bool:
    """Whether a value of type `kind` may be a model."""
    return next(_models(kind), None) is not None


def _arguments(kind: Any) -> Iterator[Any]:
    """The types of the values of a list or mapping, also where it is one branch of a union."""
    if _is_container(kind):
        yield get_args(kind)[-1]
    elif not isinstance(kind, type):
        for argument in get_args(kind):
            yield from _arguments(argument)


def _is_container(kind: Any) -> bool:
    origin = getattr(kind, "__origin__", None)
    return isinstance(origin, type) and issubclass(origin, (list, tuple, dict, set, frozenset, Mapping))

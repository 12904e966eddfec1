"""Options of methods, benchmarks and configuration nodes: dataclasses filled from plain data, with types checked."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

Options = TypeVar("Options")


def typed_options(cls: type[Options], options: dict[str, Any], where: str) -> Options:
    """A dataclass of options from plain data, for example a configuration node.

    Args:
        cls: a dataclass; lists become tuples where it says so, and it validates its own values.
        options: names and values.
        where: what the options belong to, for messages.

    Raises:
        ValueError: an option that the dataclass does not have (close matches named), a wrong type, or a value out of
            range.
    """
    options = mapping(options, where)
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise ValueError(f"{where} has no option '{option}'. {did_you_mean(option, known)}")
    try:
        return _adapter(cls).validate_python(options)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        own = first.get("ctx", {}).get("error")
        if isinstance(own, Exception):  # raised by the dataclass itself: its message says it all
            raise ValueError(str(own)) from error
        option = ".".join(str(part) for part in first["loc"])
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ValueError(f"{where}, option '{option}': {message}; received {first['input']!r}") from error


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    # building one takes a thousand times longer than using it
    return TypeAdapter(cls)


def mapping(value: Any, where: str) -> dict[str, Any]:
    """A copy of a configuration node as a dict; null is an empty one.

    Raises:
        ValueError: something else than names and values.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{where} takes options as names and values, such as {{option: 1}}; received {value!r}")
    return {str(key): item for key, item in value.items()}


def require_keys(config: dict[str, Any], keys: Iterable[str]) -> None:
    """Refuse a configuration from which a key was deleted.

    Raises:
        ValueError: naming the first key that is not there.
    """
    for key in keys:
        if key not in config:
            raise ValueError(f"the configuration has no '{key}'; do not delete it, give it a value: {key}=VALUE")


def check_output_dir(value: object) -> None:
    """Refuse what is no path.

    Raises:
        ValueError: neither text nor null.
    """
    if value is not None and (not isinstance(value, str) or not value.strip() or "\0" in value):
        raise ValueError(f"output_dir must be a folder, or null for one named by the configuration; received {value!r}")


def check_flag(value: object, where: str) -> None:
    """Refuse what is neither true nor false.

    Raises:
        ValueError: naming the option and the value.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{where} must be true or false; received {value!r}")


def check_seed(value: object) -> None:
    """Refuse what is no seed.

    Raises:
        ValueError: not an integer >= 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"seed must be an integer >= 0; received {value!r}")


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """A sentence naming close matches, then every valid choice."""
    valid = list(valid)
    close = difflib.get_close_matches(word, valid, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(repr(c) for c in close)}? " if close else ""
    return f"{hint}Valid: {', '.join(valid) if valid else '(none)'}"

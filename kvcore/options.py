"""Options of methods, benchmarks and configuration nodes: dataclasses filled from plain data, with types checked."""

from __future__ import annotations

import dataclasses
import difflib
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
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise ValueError(f"{where} has no option '{option}'. {did_you_mean(option, known)}")
    try:
        return TypeAdapter(cls).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        own = first.get("ctx", {}).get("error")
        if isinstance(own, Exception):  # raised by the dataclass itself: its message says it all
            raise ValueError(str(own)) from error
        option = ".".join(str(part) for part in first["loc"])
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ValueError(f"{where}, option '{option}': {message}; received {first['input']!r}") from error


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """A sentence naming close matches, then every valid choice."""
    valid = list(valid)
    close = difflib.get_close_matches(word, valid, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(repr(c) for c in close)}? " if close else ""
    return f"{hint}Valid: {', '.join(valid) if valid else '(none)'}"

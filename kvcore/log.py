"""Logging: one place that names the project's loggers, and messages that appear once."""

from __future__ import annotations

import logging

_said: set[str] = set()


def get_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    return logging.getLogger(name)


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning the first time it is given in this process."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)

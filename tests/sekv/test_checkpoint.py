"""Router checkpoints: what is written comes back, what does not fit is refused with both named."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from kvcore.attention import attach
from kvcore.budget import ModelSpec
from kvcore.tiny import build_tiny
from sekv import SeKV
from sekv.checkpoint import SHAPE_FIELDS, SHIPPED, find_router, load_router, read_config, router_config, save_router
from sekv.routing import Router

SPEC = ModelSpec(1, 1, 1, 1, torch.bfloat16, torch.device("cpu"), 8192, (None,))


@pytest.fixture(scope="module")
def model():
    return build_tiny(hidden_size=64, intermediate_size=64, num_hidden_layers=2)[0]


def test_round_trip(model, tmp_path):
    spec, method = attach(model), SeKV(checkpoint="none")
    router = Router(router_config(spec, **method.router_form()))
    with torch.no_grad():
        router.raw_tau.add_(0.25)
    path = tmp_path / "router.safetensors"
    save_router(router, path, spec.backbone_id, {"seed": "1"})
    back = load_router(path, spec)
    assert back.config == router.config
    assert torch.equal(back.raw_tau, router.raw_tau)
    assert not any(parameter.requires_grad for parameter in back.parameters())
    assert SeKV.from_pretrained(path).new_cache(model, 0.5).layers[0].router.raw_tau.equal(router.raw_tau)
    assert [file.name for file in tmp_path.iterdir()] == ["router.safetensors"]  # no partial file


def test_another_backbone_is_refused_with_both_named(model, tmp_path):
    spec = attach(model)
    other = attach(build_tiny(hidden_size=64, intermediate_size=64, num_hidden_layers=3)[0])
    path = tmp_path / "router.safetensors"
    save_router(Router(router_config(spec, **SeKV().router_form())), path, "some/backbone")
    with pytest.raises(ValueError, match=r"some/backbone.*'num_layers': 2.*'num_layers': 3"):
        load_router(path, other)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"checkpoint=none"):
        load_router(tmp_path / "absent.safetensors")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="not a SeKV checkpoint"):
        load_router(tmp_path / "foreign.safetensors")


def test_another_form_is_refused(model, tmp_path):
    spec = attach(model)
    path = tmp_path / "router.safetensors"
    save_router(Router(router_config(spec, **SeKV().router_form())), path, spec.backbone_id)
    with pytest.raises(ValueError, match="global_threshold"):
        SeKV(checkpoint=str(path), global_threshold=True).new_cache(model, 0.5)


def shipped():
    files = sorted(SHIPPED.glob("*.safetensors"))
    assert files
    return files


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_a_shipped_router_is_small_says_how_it_was_made_and_is_found(path):
    assert path.stat().st_size < 5e6
    with safe_open(str(path), framework="pt") as stored:
        metadata = stored.metadata()
    notes = json.loads(metadata["notes"])
    assert notes["command"].startswith("python train.py") and {"seed", "data", "training_seconds", "git"} <= set(notes)
    assert not any(
        argument.startswith("/") or "=/" in argument for argument in notes["command"].replace("'", "").split()
    )
    config = read_config(path)
    own = replace(SPEC, **{field: getattr(config, field) for field in SHAPE_FIELDS}, backbone_id=metadata["backbone"])
    assert find_router(config, own) == path
    assert find_router(config, replace(own, backbone_id="another/model")) is None
    with pytest.raises(ValueError, match="another/model"):
        load_router(path, replace(own, backbone_id="another/model"))
    router = load_router(path, own)
    untrained = Router(config)
    assert any(not torch.equal(a, b) for a, b in zip(router.parameters(), untrained.parameters(), strict=True))

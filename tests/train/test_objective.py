"""Losses and student on a tiny model: gradients (H2), frozen backbone, causality, memory, equality with decoding."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from kvcore.attention import attach, prefill
from kvcore.budget import Budget
from kvcore.tiny import build_tiny
from sekv.checkpoint import router_config
from sekv.method import SeKV
from sekv.objective import PARTS, SeKVObjective, _SampleLosses
from sekv.routing import Router
from sekv.train_config import LossConfig, TrainConfig

pytestmark = pytest.mark.versions
# training weighs tokens by their own estimates: that their neighbours come along is a matter of decoding
TOKEN_FORM: dict[str, Any] = {"sketch_dims": 8, "tau": 2.0, "neighbours": 0}
SPAN_FORM: dict[str, Any] = {"summary": "second_order", "maps": "untied", "tau": 1.0}
PUBLISHED: dict[str, Any] = {
    "summary": "mean",
    "maps": "tied",
    "decision": "probability",
    "tau": 0.05,
    "gates": True,
    "max_rank": 4,
    "row_bits": 0,
    "mass_weighted": False,
    "weighted_summary": True,
}
FORMS = {"tokens": TOKEN_FORM, "spans": SPAN_FORM, "published": PUBLISHED}
ALL = LossConfig(distill=1.0, listwise=1.0, zoom=1.0, reconstruction=0.5, budget=0.1)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    built, _ = build_tiny(num_hidden_layers=2, initializer_range=0.2)
    built.config.backbone_id = "tiny"
    return built.requires_grad_(False)


def objective(model: PreTrainedModel, form: dict[str, Any], budget: float = 0.3, **train: Any) -> SeKVObjective:
    method = SeKV(**{"window": 8, "window_block": 4, "min_span": 4, "span_tokens": 12, "checkpoint": "none", **form})
    router = Router(router_config(attach(model), **method.router_form()))
    options = {"steps": 10, "sequence": (224,), "query_tokens": 32, "losses": ALL, **train}
    return SeKVObjective(model, router, method, Budget(budget), TrainConfig(**options))


def tokens(count: int = 224, seed: int = 0) -> Tensor:
    return torch.randint(5, 290, (1, count), generator=torch.Generator().manual_seed(seed))


def weight_hash(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("form", FORMS)
def test_every_parameter_learns_and_the_backbone_does_not(model: PreTrainedModel, form: str) -> None:
    before = weight_hash(model)
    task = objective(model, FORMS[form])
    result = task.accumulate(tokens(), 0, 1.0, 0.1)
    for name, parameter in task.router.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert float(parameter.grad.abs().max()) > 0, name
    torch.optim.AdamW(task.router.parameters(), lr=1e-3).step()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert weight_hash(model) == before
    expected = {"distill", "listwise", "zoom", "budget"} | ({"reconstruction"} if form == "published" else set())
    assert set(result.parts) == expected
    assert {"expansion_rate", "mass_found", "effective_rank"} <= set(result.measures)
    assert float(result.loss) > 0


@pytest.mark.parametrize("form", ["tokens", "published"])
def test_gradient_checkpointing_changes_nothing(model: PreTrainedModel, form: str) -> None:
    found = []
    for checkpointing in (False, True):
        task = objective(model, FORMS[form], gradient_checkpointing=checkpointing)
        result = task.accumulate(tokens(), 0, 1.0, 0.1)
        found.append((result.loss, [p.grad.clone() for p in task.router.parameters() if p.grad is not None]))
    assert float(found[0][0]) == pytest.approx(float(found[1][0]), rel=1e-6)
    for one, two in zip(found[0][1], found[1][1], strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", ["tokens", "spans"])
def test_zooming_into_everything_is_the_full_model(model: PreTrainedModel, form: str) -> None:
    task = objective(model, {**FORMS[form], "row_bits": 0, "max_zoom": 1.0})
    with torch.no_grad():
        task.router.raw_tau.fill_(-80.0)
    measures = task.evaluate(tokens())
    assert float(measures["expansion_rate"]) == 1.0
    assert abs(float(measures["distill"])) < 1e-5


def student_hidden(task: SeKVObjective, ids: Tensor) -> Tensor:
    found: list[Tensor] = []
    handle = task.model.get_decoder().norm.register_forward_hook(lambda m, a, out: found.append(out.detach()))
    with torch.no_grad():
        _SampleLosses(task, task._teacher(ids), dict.fromkeys(PARTS, 0.0), 1.0).student(False)
    handle.remove()
    return found[-1]


@pytest.mark.parametrize("form", FORMS)
def test_no_future_token_reaches_a_query(model: PreTrainedModel, form: str) -> None:
    task, ids = objective(model, FORMS[form]), tokens()
    changed = ids.clone()
    changed[0, 210:] = (changed[0, 210:] + 17) % 280 + 5
    one, two = student_hidden(task, ids), student_hidden(task, changed)
    assert torch.equal(one[:, : 210 - 192], two[:, : 210 - 192])
    assert not torch.equal(one[:, 210 - 192 :], two[:, 210 - 192 :])


@pytest.mark.parametrize("form", ["tokens", "spans"])
def test_first_query_is_the_first_decode_step(model: PreTrainedModel, form: str) -> None:
    task, ids = objective(model, {**FORMS[form], "max_zoom": 1.0}), tokens()
    trained = student_hidden(task, ids)[:, :1]
    cache = task.method.new_cache(model, 0.3)
    for layer in cache.layers:
        layer.router = task.router  # type: ignore[attr-defined]
    with torch.no_grad():
        prefill(model, cache, ids[:, :192])
        decoded = model.get_decoder()(input_ids=ids[:, 192:193], past_key_values=cache).last_hidden_state
    assert torch.allclose(trained, decoded, rtol=1e-3, atol=1e-3)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_square_matrix_and_no_queries_by_context_kept(model: PreTrainedModel) -> None:
    context, queries = 1152, 128
    task = objective(model, TOKEN_FORM, budget=0.2, sequence=(context + queries,), query_tokens=queries)
    kept: list[int] = []
    with (
        LargestTensor() as seen,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t),
    ):
        sample = _SampleLosses(task, task._teacher(tokens(context + queries)), dict.fromkeys(PARTS, 0.0), 1.0)
        sample.student(True)
    heads = task.spec.num_heads
    assert seen.numel < context * context
    assert max(kept) < heads * queries * context // 2


def test_listwise_alone_needs_no_second_pass(model: PreTrainedModel) -> None:
    task = objective(model, TOKEN_FORM, losses=LossConfig(distill=0, listwise=1, zoom=0, reconstruction=0, budget=0))
    calls: list[int] = []
    handle = model.get_decoder().register_forward_hook(lambda *args: calls.append(1))
    result = task.accumulate(tokens(), 0, 1.0, 0.0)
    handle.remove()
    assert len(calls) == 1
    assert set(result.parts) == {"listwise", "budget"} - ({"budget"} if task.config.losses.budget == 0 else set())


def test_distill_every_skips_steps(model: PreTrainedModel) -> None:
    task = objective(model, TOKEN_FORM, losses=LossConfig(distill=1, distill_every=2, listwise=1))
    assert "distill" in task.accumulate(tokens(), 0, 1.0, 0.0).parts
    assert "distill" not in task.accumulate(tokens(), 1, 1.0, 0.0).parts


def test_hundred_steps_beat_a_random_router(model: PreTrainedModel) -> None:
    losses = LossConfig(distill=0, listwise=1, zoom=0, reconstruction=0, budget=0)
    form = {"summary": "mean", "maps": "untied", "tau": 1.0, "map_rank": 16}
    task = objective(model, form, sequence=(96,), query_tokens=8, losses=losses)
    torch.manual_seed(3)
    with torch.no_grad():
        task.router.query_map.normal_(std=0.3)
        task.router.log_gain.normal_(std=0.5)
    heldout = [tokens(96, 1000 + seed) for seed in range(3)]
    random = [task.evaluate(ids) for ids in heldout]
    optimizer = torch.optim.AdamW(task.router.parameters(), lr=5e-3)
    for step in range(100):
        optimizer.zero_grad()
        task.accumulate(tokens(96, step), step, 1.0, 0.0)
        optimizer.step()
    trained = [task.evaluate(ids) for ids in heldout]
    for name, sign in (("listwise", 1), ("mass_found_at_share", -1)):
        before, after = ([float(m[name]) for m in measures] for measures in (random, trained))
        assert sign * sum(after) < sign * sum(before), (name, before, after)

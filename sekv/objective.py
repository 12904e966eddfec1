"""Forward and backward of one training sample.

The teacher's one pass gives queries, keys and values of every layer. Per layer, the memory is built from the context
alone, without gradient, and the router's local losses go backward at once: no graph outlives its block of queries.
Only the distillation loss runs the frozen backbone a second time, over the query tokens, with gradients.

Legend: B batch rows (1), Hq query heads, Hkv KV heads, T context tokens, Q query tokens, P mined queries, S spans,
L layers, d head dimension, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kvcore.attention import attach
from kvcore.budget import Budget, ModelSpec
from kvcore.cache import CompressedCache, Phase
from kvcore.layer import CacheLayer, LayerPrompt
from sekv import losses
from sekv.method import SeKV
from sekv.routing import Router, dot
from sekv.student import causal_logits, route, student_attention
from sekv.teacher import (
    QUERY_BLOCK,
    Capture,
    LayerCapture,
    capture,
    mine_queries,
)
from sekv.train_config import TrainConfig
from sekv.trainer import SampleResult
from sekv.training_memory import ContextMemory, LayerMemory, half_precision, plain_precision

PARTS = ("listwise", "zoom", "reconstruction", "budget")


@dataclass
class SeKVObjective:
    """The losses of the article, and the listwise loss, for one backbone and one router.

    Attributes:
        model: the frozen causal LM.
        router: being trained.
        method, budget: the form of the memory that is trained for.
        config: options.
        chunk_size: tokens per forward of the teacher; None reads a sample in one.
    """

    model: PreTrainedModel
    router: Router
    method: SeKV
    budget: Budget
    config: TrainConfig
    chunk_size: int | None = None
    spec: ModelSpec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = attach(self.model)

    def accumulate(self, ids: Tensor, step: int, scale: float, budget_weight: float) -> SampleResult:
        """Add `scale` x the gradient of the sample's loss to the router. See `trainer.Objective`."""
        loss = self.config.losses
        weights = {
            "listwise": loss.listwise,
            "zoom": loss.zoom,
            "reconstruction": loss.reconstruction if self.router.config.gates else 0.0,
            "budget": budget_weight,
        }
        sample = _SampleLosses(self, self._teacher(ids), weights, scale)
        distill: Tensor | None = None
        if loss.distill > 0 and step % loss.distill_every == 0:
            distill = sample.student(self.config.gradient_checkpointing)
            (distill * (loss.distill * scale)).backward()
        else:
            for layer in range(self.spec.num_layers):
                sample.local(layer)
        result = sample.result()
        if distill is not None:
            result.parts["distill"] = distill.detach().reshape(1)
            result.loss = result.loss + loss.distill * distill.detach()
        return result

    @torch.no_grad()
    def evaluate(self, ids: Tensor) -> dict[str, Tensor]:
        """Measures of a held-out sample. `criterion` is the distillation KL where it is trained, else listwise."""
        sample = _SampleLosses(self, self._teacher(ids), dict.fromkeys(PARTS, 0.0), 1.0, evaluating=True)
        measures: dict[str, Tensor] = {}
        if self.config.losses.distill > 0:
            measures["distill"] = sample.student(False)
        else:
            for layer in range(self.spec.num_layers):
                sample.local(layer)
        result = sample.result()
        measures |= {"listwise": result.parts["listwise"].mean(), **result.measures}
        measures["criterion"] = measures.get("distill", measures["listwise"])
        return measures

    def _teacher(self, ids: Tensor) -> Capture:
        context = ids.shape[1] - self.config.query_tokens
        share = self.config.mined_share
        memory = ContextMemory(self.model, self.method, self.budget)
        return capture(self.model, ids, context, memory, self.chunk_size, self.config.mixed_precision, mine=share < 1)


class _SampleLosses:
    """The losses of one sample, layer by layer.

    Args:
        owner: the objective.
        teacher: the teacher's pass.
        weights: of the local losses.
        scale: factor on every gradient.
        evaluating: compute the measures of an evaluation, and no gradient.
    """

    def __init__(
        self,
        owner: SeKVObjective,
        teacher: Capture,
        weights: dict[str, float],
        scale: float,
        evaluating: bool = False,
    ) -> None:
        self.owner, self.router, self.teacher = owner, owner.router, teacher
        self.weights, self.scale, self.evaluating = weights, scale, evaluating
        self.mined = torch.arange(owner.config.query_tokens, device=teacher.hidden.device)
        if teacher.far_mass is not None:
            self.mined = mine_queries(teacher.far_mass, owner.config.mined_share)[0]
        self.parts: list[dict[str, Tensor]] = []
        self.measures: list[dict[str, Tensor]] = []

    def local(self, layer: int) -> LayerMemory:
        """Local losses of a layer, backward at once; returns the layer's memory for the student."""
        owner, seen = self.owner, self.teacher.layers[layer]
        memory = self.teacher.memory.memory(layer)
        parts, measures = self._once_per_layer(layer, memory)
        for positions in self.mined.split(QUERY_BLOCK):
            share = len(positions) / len(self.mined)
            block_parts, block_measures = self._block(layer, seen, positions, memory)
            self._backward(block_parts, share / owner.spec.num_layers)
            _add(parts, block_parts, share)
            _add(measures, block_measures, share)
        self.parts.append(parts)
        self.measures.append(measures)
        return memory

    def _once_per_layer(self, layer: int, memory: LayerMemory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The losses of the rank gates, which do not depend on queries."""
        if memory.factors is None:
            return {}, {"effective_rank": memory.stored_rank()}
        gates = memory.factors.gated(self.router)
        errors = [
            losses.reconstruction(factors.sigma, gate)
            for factors, gate in zip((memory.factors.keys, memory.factors.values), gates, strict=True)
        ]
        retained = torch.stack([gate.mean() for gate in gates]).mean()
        parts = {
            "reconstruction": torch.stack(errors).sum(),
            "budget": retained * self.owner.config.losses.rank_weight,
        }
        self._backward(parts, 1.0 / self.owner.spec.num_layers)
        rank = retained.detach() * gates[0].shape[-1]
        return {name: value.detach() for name, value in parts.items()}, {"effective_rank": rank}

    def _block(
        self, layer: int, seen: LayerCapture, positions: Tensor, memory: LayerMemory
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses and measures of some mined queries of one layer."""
        router, config, context = self.router, self.owner.config.losses, self.teacher.context
        query, own = seen.query[:, :, positions], seen.keys[:, :, context:]
        routing = route(router, layer, query, causal_logits(query, own, positions), memory)
        with torch.no_grad():
            exact = dot(query, seen.keys[:, :, : memory.keys.shape[2]]).float()
            masses = exact if memory.by_token else router.span_mass(exact, memory.summary)
        calibrated = routing.resident if router.config.decision == "mass" else None
        parts = {"budget": losses.masked_mean(routing.zoom, routing.valid)}
        if self.weights["listwise"] > 0 or self.evaluating:
            parts["listwise"] = losses.listwise(routing.scores, masses, routing.valid, calibrated)
        if self.weights["zoom"] > 0:
            target = losses.coverage_target(masses, routing.valid, config.coverage)
            parts["zoom"] = losses.zoom_bce(routing.log_odds, target, routing.valid, config.positive_weight)
        zoom = routing.zoom.detach()
        measures = {
            "expansion_rate": losses.masked_mean(zoom, routing.valid),
            "mass_found": losses.mass_found(zoom, masses, routing.valid),
        }
        if self.evaluating:
            share = self.owner.config.zoom_share
            measures["mass_found_at_share"] = losses.mass_found_at(
                routing.scores, masses, routing.lengths, routing.valid, share
            )
        return parts, measures

    def _backward(self, parts: dict[str, Tensor], share: float) -> None:
        used = [self.weights[name] * value for name, value in parts.items() if self.weights[name] > 0]
        if used and torch.is_grad_enabled():
            (torch.stack(used).sum() * (share * self.scale)).backward()

    def result(self) -> SampleResult:
        """Parts per layer, measures averaged over layers, and the weighted sum."""
        parts = {
            name: torch.stack([layer[name].detach().float() for layer in self.parts])
            for name in PARTS
            if name in self.parts[0] and (self.weights[name] > 0 or self.evaluating)
        }
        names = self.measures[0]
        measures = {name: torch.stack([layer[name].float() for layer in self.measures]).mean() for name in names}
        weighted = [self.weights[name] * values.mean() for name, values in parts.items()]
        loss = torch.stack([self.teacher.hidden.new_zeros((), dtype=torch.float32), *weighted]).sum()
        return SampleResult(parts, measures, loss)

    # --- the student
    def student(self, checkpointing: bool) -> Tensor:
        """Distillation loss: the frozen backbone over the query tokens, attending through the memory."""
        model, teacher = self.owner.model, self.teacher
        cache = _StudentCache(self, checkpointing)
        with half_precision(model, self.owner.config.mixed_precision):
            output = model.get_decoder()(input_ids=teacher.input_ids[:, teacher.context :], past_key_values=cache)
        student = output.last_hidden_state.to(self.owner.spec.dtype)
        head = model.get_output_embeddings()
        target = teacher.hidden[:, teacher.context :][:, self.mined]
        return losses.distillation(target[0], student[0, self.mined], head)


class _StudentCache(CompressedCache):
    """A cache that already holds the context: the teacher's keys and values, read layer by layer."""

    def __init__(self, sample: _SampleLosses, checkpointing: bool) -> None:
        spec, budget = sample.owner.spec, Budget(1.0)

        def layers() -> list[CacheLayer]:
            return [_StudentLayer(spec, budget, index, sample, checkpointing) for index in range(spec.num_layers)]

        super().__init__(spec, budget, layers, "student")
        self.phase = Phase.DECODE
        self._tokens = sample.teacher.context
        self._padding = [0] * sample.teacher.input_ids.shape[0]


class _StudentLayer(CacheLayer):
    """Mixed-resolution attention of the query tokens over the memory and, causally, themselves."""

    def __init__(
        self, spec: ModelSpec, budget: Budget, layer_idx: int, sample: _SampleLosses, checkpointing: bool
    ) -> None:
        super().__init__(spec, budget, layer_idx)
        self.sample, self.checkpointing = sample, checkpointing

    def build(self, prompt: LayerPrompt) -> None:
        raise RuntimeError("the student reads the teacher's prefill")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        with plain_precision(query):
            query, key, value = (tensor.to(self.spec.dtype) for tensor in (query, key, value))
            return self._attend(query * scale, key, value)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        memory = self.sample.local(self.layer_idx)
        positions = torch.arange(query.shape[2], device=query.device)
        outputs = []
        for block, rows in zip(query.split(QUERY_BLOCK, 2), positions.split(QUERY_BLOCK), strict=True):
            arguments = (self.sample.router, self.layer_idx, block, rows, key, value, memory)
            if self.checkpointing and torch.is_grad_enabled():
                outputs.append(checkpoint(student_attention, *arguments, use_reentrant=False))
            else:
                outputs.append(student_attention(*arguments))
        return torch.cat(outputs, dim=2)


def _add(total: dict[str, Tensor], more: dict[str, Tensor], share: float) -> None:
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value.detach() * share

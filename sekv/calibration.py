"""Where thresholds start: every head zooms until one more token matters equally little for the model's output.

Leaving token t of a span coarse changes a head's output by p_t (v_t - v̄). To second order this changes the output
distribution by ½ E[(g · δo)²], g the gradient of log p(y), y ~ p (the Fisher information). So a token deserves zooming
where p_t c reaches a level shared by all layers and heads, with c² = E[(p_t g·(v_t - v̄))²] / E[p_t²] measured per head:
tau[l, h] is proportional to 1 / c[l, h]. One backward pass through the frozen backbone measures every head at once.

Legend: B batch rows, L layers, Hq query heads, Hkv KV heads, N tokens of the map, Q query tokens, S spans, d head
dimension, K histogram bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.budget import Budget, ModelSpec
from kvcore.cache import CompressedCache, Phase
from kvcore.kernels import prefill_attention
from kvcore.layer import CacheLayer, LayerPrompt
from sekv.objective import SeKVObjective
from sekv.routing import dot
from sekv.student import causal_logits, route
from sekv.teacher import QUERY_BLOCK, Capture
from sekv.training_memory import LayerMemory, half_precision

LOWEST, HIGHEST, BINS = -8.0, 8.0, 320  # histogram of log multiples of the uniform share

LARGEST_SHIFT = 3.0  # no head's threshold moves by more than e^3 from the mean


class ThresholdCalibration:
    """Collects sensitivities and expected masses over samples, then sets `router.raw_tau`.

    Args:
        objective: model, router and form; the router's thresholds are replaced by `apply`.
        seed: of the sampled next tokens.
    """

    def __init__(self, objective: SeKVObjective, seed: int = 0) -> None:
        spec, self.objective = objective.spec, objective
        shape = (spec.num_layers, spec.num_heads)
        self.harm, self.mass = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        self.counts = torch.zeros(*shape, BINS, dtype=torch.float64)
        self.generator = torch.Generator().manual_seed(seed)

    def add(self, ids: Tensor) -> None:
        """Measure one sample [1, N]."""
        teacher = self.objective._teacher(ids)
        gradients = output_gradients(self.objective, teacher, self.generator)
        with torch.no_grad():
            for layer, gradient in enumerate(gradients):
                self._measure(layer, teacher, gradient)

    def _measure(self, layer: int, teacher: Capture, gradient: Tensor) -> None:
        """Add one layer's harm of coarse tokens, their squared mass, and the histogram of expected masses."""
        seen, memory = teacher.layers[layer], teacher.memory.memory(layer)
        own = seen.keys[:, :, teacher.context :]
        for rows in torch.arange(gradient.shape[2], device=gradient.device).split(QUERY_BLOCK):
            query = seen.query[:, :, rows]
            routing = route(self.objective.router, layer, query, causal_logits(query, own, rows), memory)
            outside = memory.outside.repeat_interleave(query.shape[1] // own.shape[1], dim=1)
            exact = dot(query, seen.keys[:, :, : memory.keys.shape[2]]).float().masked_fill(outside, float("-inf"))
            total = torch.logaddexp(exact.logsumexp(-1), routing.resident).unsqueeze(-1)
            share = torch.exp(exact - total)
            coarse = share * (_tokens_of(routing.zoom, memory) == 0)
            harm = coarse * _difference(gradient[:, :, rows], memory)
            self.harm[layer] += harm.square().sum((0, 2, 3)).double().cpu()
            self.mass[layer] += coarse.square().sum((0, 2, 3)).double().cpu()
            tau = self.objective.router.tau(layer)[..., 0, 0].log()[:, None, None]
            multiples = (routing.log_odds * self.objective.router.config.temperature + tau).float()
            self.counts[layer] += _histogram(multiples)

    def apply(self) -> Tensor:
        """Set the thresholds; the expected number of zoomed units stays what it was. Returns log tau [L, Hq]."""
        router = self.objective.router
        if router.config.decision != "mass" or router.config.global_threshold:
            raise ValueError(
                "thresholds are calibrated for decision=mass with one threshold per layer and head; received decision="
                f"{router.config.decision}, global_threshold={router.config.global_threshold}. Set "
                "train.calibration_samples=0"
            )
        before = router.raw_tau.detach().double().cpu()
        seen = (self.mass > 0) & (self.harm > 0)
        wanted = self._zoomed(before)
        if not bool(seen.any()) or wanted < 1:
            raise ValueError(
                "thresholds cannot be calibrated: the samples leave nothing coarse, or nothing to zoom into. Use "
                "longer samples (train.sequence), a smaller budget, or train.calibration_samples=0"
            )
        sensitivity = torch.where(seen, 0.5 * (self.harm / self.mass).log(), torch.nan)
        relative = (sensitivity.nanmean() - sensitivity).nan_to_num(0.0).clamp(-LARGEST_SHIFT, LARGEST_SHIFT)
        low, high = LOWEST - float(relative.max()), HIGHEST - float(relative.min())
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._zoomed(relative + middle) > wanted else (low, middle)
        log_tau = relative + (low + high) / 2
        with torch.no_grad():
            router.raw_tau.copy_(log_tau)
        return log_tau

    def _zoomed(self, log_tau: Tensor) -> float:
        """Expected number of zoomed units at thresholds [L, Hq]."""
        edges = torch.linspace(LOWEST, HIGHEST, BINS + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2
        # a sigmoid as wide as a bin: the count is continuous in tau
        above = torch.sigmoid((middles - log_tau.unsqueeze(-1)) * BINS / (HIGHEST - LOWEST))
        return float((self.counts * above).sum())


def output_gradients(objective: SeKVObjective, teacher: Capture, generator: torch.Generator) -> list[Tensor]:
    """Gradients [B, Hq, Q, d] per layer of Σ log p(y) with respect to the attention outputs of the exact model.

    Args:
        objective: the frozen model.
        teacher: its pass over the sample.
        generator: draws y.
    """
    model, precision = objective.model, objective.config.mixed_precision
    cache = _ExactCache(objective.spec, teacher)
    with torch.enable_grad(), half_precision(model, precision):
        hidden = model.get_decoder()(
            input_ids=teacher.input_ids[:, teacher.context :], past_key_values=cache
        ).last_hidden_state
        logits = model.get_output_embeddings()(hidden).float().log_softmax(-1)
        drawn = torch.multinomial(logits[0].exp().cpu(), 1, generator=generator).to(logits.device)
        return list(torch.autograd.grad(logits[0].gather(-1, drawn).sum(), cache.probes))


class _ExactCache(CompressedCache):
    """Exact attention over the captured context, with a zero added to every layer's output to take gradients at."""

    def __init__(self, spec: ModelSpec, teacher: Capture) -> None:
        self.probes: list[Tensor] = []
        budget = Budget(1.0)

        def layers() -> list[CacheLayer]:
            return [_ExactProbe(spec, budget, index, teacher, self.probes) for index in range(spec.num_layers)]

        super().__init__(spec, budget, layers, "probe")
        self.phase = Phase.DECODE
        self._tokens = teacher.context
        self._padding = [0] * teacher.input_ids.shape[0]


class _ExactProbe(CacheLayer):
    """See `_ExactCache`."""

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int, teacher: Capture, probes: list[Tensor]) -> None:
        super().__init__(spec, budget, layer_idx)
        self.teacher, self.probes = teacher, probes

    def build(self, prompt: LayerPrompt) -> None:
        raise RuntimeError("the probe reads the teacher's prefill")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        seen, context = self.teacher.layers[self.layer_idx], self.teacher.context
        keys = torch.cat([seen.keys[:, :, :context].to(key.dtype), key], dim=2)
        values = torch.cat([seen.values[:, :, :context].to(value.dtype), value], dim=2)
        output = prefill_attention(query, keys, values, scale, self._no_padding(query))
        self.probes.append(torch.zeros_like(output, dtype=torch.float32, requires_grad=True))
        return output + self.probes[-1].to(output.dtype)

    @staticmethod
    def _no_padding(query: Tensor) -> list[int]:
        return [0] * query.shape[0]


def _tokens_of(zoom: Tensor, memory: LayerMemory) -> Tensor:
    """Decisions [B, Hq, P, N] of tokens from those of units."""
    if memory.by_token:
        return zoom
    padded = torch.nn.functional.pad(zoom, (0, 1))
    return padded.gather(-1, memory.span_of_token[:, None, None].expand(*zoom.shape[:3], -1))


def _difference(gradient: Tensor, memory: LayerMemory) -> Tensor:
    """g · (v_t - v̄) [B, Hq, P, N] of every token and its span's coarse value; 0 for tokens of no span."""
    fine, coarse = dot(gradient, memory.values), dot(gradient, memory.coarse_values)
    padded = torch.nn.functional.pad(coarse, (0, 1))
    index = memory.span_of_token[:, None, None]
    inside = index < coarse.shape[-1]
    return (fine - padded.gather(-1, index.expand(*fine.shape))) * inside


def _histogram(multiples: Tensor) -> Tensor:
    """Counts [Hq, K] (fp64) of log multiples [B, Hq, P, S]; what lies outside the range counts at its ends."""
    heads = multiples.transpose(0, 1).flatten(1)
    index = ((heads - LOWEST) * (BINS / (HIGHEST - LOWEST))).nan_to_num(neginf=0.0).clamp(0, BINS - 1).long()
    weight = heads.isfinite().double()
    return torch.zeros(heads.shape[0], BINS, dtype=torch.float64).scatter_add_(1, index.cpu(), weight.cpu())

"""The training losses, and the measures logged beside them. arXiv 2606.31145, section 3.3; sekv.md section 1, item 9.

Legend: B batch rows, Hq query heads, Q query tokens, S units of zooming (spans, or single tokens), R rank, P mined
positions, V vocabulary, D hidden size.
Masses are natural logs of unnormalised attention mass, log Σ_t exp(q·k_t / sqrt(d)).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

POSITIVE_WEIGHT = 10.0
COVERAGE = 0.9
# Positions whose logits exist at once: bounds teacher + student logits to 2 x 128 x V.
POSITION_BLOCK = 128


def distillation(teacher_hidden: Tensor, student_hidden: Tensor, head: torch.nn.Module) -> Tensor:
    """Mean KL(full ‖ SeKV) of the next-token distributions, in nats.

    Args:
        teacher_hidden, student_hidden: [P, D] after the final norm.
        head: the frozen LM head.
    """
    total = student_hidden.new_zeros((), dtype=torch.float32)
    for teacher, student in zip(
        teacher_hidden.split(POSITION_BLOCK), student_hidden.split(POSITION_BLOCK), strict=True
    ):
        with torch.no_grad():
            target = head(teacher).float().log_softmax(-1)
        predicted = head(student).float().log_softmax(-1)
        total = total + F.kl_div(predicted, target, reduction="sum", log_target=True)
    return total / len(student_hidden)


def listwise(scores: Tensor, masses: Tensor, valid: Tensor, resident: Tensor | None) -> Tensor:
    """KL of the teacher's attention over spans to the router's, mean over heads and queries, in nats.

    Args:
        scores: [B, Hq, Q, S] the router's log masses; -inf for padding spans.
        masses: [B, Hq, Q, S] the teacher's log masses.
        valid: bool [B, 1 or Hq, 1, S], units that routing decides about.
        resident: [B, Hq, Q] log mass of the exactly kept entries: one more outcome, which calibrates the scores.
            None compares the distributions over spans alone (scores without a scale of their own).
    """
    hidden = ~valid
    scores = scores.masked_fill(hidden, float("-inf"))
    masses = masses.masked_fill(hidden, float("-inf"))
    if resident is not None:
        scores = torch.cat([scores, resident.unsqueeze(-1)], dim=-1)
        masses = torch.cat([masses, resident.unsqueeze(-1)], dim=-1)
    target, predicted = masses.log_softmax(-1), scores.log_softmax(-1)
    outcome = target.isfinite()  # the other outcomes have no mass at all
    difference = torch.where(outcome, target, 0.0) - torch.where(outcome, predicted, 0.0)
    return (torch.where(outcome, target.exp(), 0.0) * difference).sum(-1).mean()


def coverage_target(masses: Tensor, valid: Tensor, coverage: float = COVERAGE) -> Tensor:
    """1 for the smallest set of spans that covers a share of the teacher's attention on spans, else 0.

    Args:
        masses: [B, Hq, Q, S] the teacher's log masses.
        valid: bool [B, 1 or Hq, 1, S].
        coverage: rho, the share to cover.
    """
    share = masses.masked_fill(~valid, float("-inf")).softmax(-1)
    ordered, order = share.sort(dim=-1, descending=True)
    wanted = (ordered.cumsum(-1) - ordered) < coverage
    return torch.zeros_like(share).scatter_(-1, order, wanted.to(share.dtype)) * valid


def zoom_bce(logits: Tensor, target: Tensor, valid: Tensor, positive_weight: float = POSITIVE_WEIGHT) -> Tensor:
    """Binary cross-entropy of the zoom probability (not of the decision), mean over spans.

    Args:
        logits: [B, Hq, Q, S], log-odds of the zoom probability.
        target: [B, Hq, Q, S] from `coverage_target`.
        valid: bool [B, 1 or Hq, 1, S].
        positive_weight: weight of spans to zoom into.
    """
    weight = logits.new_tensor(positive_weight)
    kept = valid.expand_as(logits)
    safe = torch.where(kept, logits, 0.0)
    each = F.binary_cross_entropy_with_logits(safe, target, pos_weight=weight, reduction="none")
    return (each * kept).sum() / kept.sum().clamp_min(1)


def reconstruction(sigma: Tensor, gates: Tensor) -> Tensor:
    """Gated spectral error Σ (1 - g_i)² σ_i² / Σ σ_i², mean over spans; what dropping components loses.

    Args:
        sigma: [..., R] singular values of the spans' key or value matrices.
        gates: [..., R] in (0, 1).
    """
    energy = sigma.float().square()
    return ((1.0 - gates.float()).square() * energy).sum(-1).div(energy.sum(-1).clamp_min(1e-12)).mean()


def masked_mean(values: Tensor, valid: Tensor) -> Tensor:
    """Mean of [B, Hq, Q, S] over the spans that exist (valid: bool [B, 1 or Hq, 1, S])."""
    kept = valid.expand_as(values)
    return torch.where(kept, values, 0.0).sum() / kept.sum().clamp_min(1)


def mass_found(zoom: Tensor, masses: Tensor, valid: Tensor) -> Tensor:
    """Share of the teacher's attention on spans that falls into the zoomed spans, mean over heads and queries."""
    share = masses.masked_fill(~valid, float("-inf")).softmax(-1)
    return (share * zoom.detach()).sum(-1).mean()


def mass_found_at(scores: Tensor, masses: Tensor, lengths: Tensor, valid: Tensor, token_share: float) -> Tensor:
    """Share of the teacher's attention on spans found when every query zooms into a fixed share of the tokens.

    Spans are taken by expected mass per token until the tokens are used up, so that forms compare at equal zoom.

    Args:
        scores: [B, Hq, Q, S] the router's log masses.
        masses: [B, Hq, Q, S] the teacher's log masses.
        lengths: [B, S] tokens per span.
        valid: bool [B, 1 or Hq, 1, S].
        token_share: tokens zoomed into, as a share of the spans' tokens.
    """
    tokens = lengths[:, None, None] * valid
    density = scores - lengths.clamp_min(1).log()[:, None, None]
    order = density.masked_fill(~valid, float("-inf")).argsort(-1, descending=True)
    ordered = tokens.expand_as(scores).gather(-1, order)
    taken = ordered.cumsum(-1) <= token_share * tokens.sum(-1, keepdim=True)
    share = masses.masked_fill(~valid, float("-inf")).softmax(-1).gather(-1, order)
    return (share * taken).sum(-1).mean()

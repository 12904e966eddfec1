"""The online probe: which queries look at the prompt, and what an error of a key or value would do to them.

Probe queries are taken from the attention function during the prefill: recent tokens, document boundaries and rows of
high attention entropy. Nothing is recomputed and no T x T matrix exists: everything is P probe rows against n tokens.

Legend: Hq query heads, H KV heads, G = Hq / H, n tokens of one row (padding excluded), P probe queries,
d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from freqdepth.felt import attention_rows, between, felt_evenly, felt_in_output, in_strips

Weighting = Literal["mixed", "attention", "uniform"]
# Distance of the rows among which those of high entropy are looked for, in tokens.
CANDIDATE_STRIDE = 32
# Rows whose entropy is computed together.
_ENTROPY_STRIP = 8


@dataclass
class ProbePlan:
    """Where the probe looks; one per cache, shared by its layers.

    Attributes:
        num_queries: P: half recent tokens, a quarter document boundaries, the rest rows of high entropy.
        boundary_ids: token ids that end or begin a document.
        boundaries: per batch row, absolute positions (padding included) of document boundaries seen so far.
    """

    num_queries: int
    boundary_ids: frozenset[int] = frozenset()
    boundaries: list[list[int]] = field(default_factory=list)

    @property
    def num_recent(self) -> int:
        return max(1, self.num_queries // 2)

    @property
    def num_boundary(self) -> int:
        return self.num_queries // 4

    def find_boundaries(self, ids: Tensor, start: int) -> None:
        """Note the boundary tokens of a prefill chunk.

        Args:
            ids: [B, Q] token ids of the chunk.
            start: position of its first token.
        """
        if not self.boundaries:
            self.boundaries = [[] for _ in range(ids.shape[0])]
        if not self.boundary_ids or self.num_boundary == 0:
            return
        hits = torch.isin(ids, torch.tensor(sorted(self.boundary_ids), device=ids.device))
        for row, position in hits.nonzero().tolist():
            self.boundaries[row].append(start + position)


class ProbeCollector:
    """Probe queries of one layer, gathered chunk by chunk."""

    def __init__(self, plan: ProbePlan) -> None:
        self.plan = plan
        self._recent: list[tuple[Tensor, Tensor]] = []  # per row: positions [p], queries [Hq, p, d]
        self._other: list[tuple[Tensor, Tensor, Tensor]] = []  # the same, with True at boundaries

    def observe(self, query: Tensor, num_keys: int, padding: list[int]) -> None:
        """Keep the candidates of a chunk [B, Hq, Q, d] that ends at token `num_keys`."""
        batch, num_heads, num_queries, head_dim = query.shape
        start = num_keys - num_queries
        if not self._recent:
            no_position = torch.empty(0, dtype=torch.long)
            nothing = query.new_empty(num_heads, 0, head_dim)
            self._recent = [(no_position, nothing)] * batch
            self._other = [(no_position, nothing, no_position.bool())] * batch
        for row in range(batch):
            first = max(start, padding[row])
            self._observe_row(row, query[row], start, torch.arange(first, num_keys), padding[row])

    def _observe_row(self, row: int, query: Tensor, start: int, positions: Tensor, padding: int) -> None:
        recent = positions[-self.plan.num_recent :]
        old_positions, old_queries = self._recent[row]
        keep = max(self.plan.num_recent - recent.shape[0], 0)
        kept = slice(max(old_positions.shape[0] - keep, 0), None)
        self._recent[row] = (
            torch.cat([old_positions[kept], recent]),
            torch.cat([old_queries[:, kept], query[:, recent - start]], dim=1),
        )
        boundaries = self.plan.boundaries[row] if self.plan.boundaries else []
        is_boundary = torch.isin(positions, torch.tensor(boundaries, dtype=torch.long))
        chosen = positions[is_boundary | ((positions - padding) % CANDIDATE_STRIDE == 0)]
        others = self._other[row]
        self._other[row] = (
            torch.cat([others[0], chosen]),
            torch.cat([others[1], query[:, chosen - start]], dim=1),
            torch.cat([others[2], is_boundary[chosen - positions[0]]]) if positions.numel() else others[2],
        )

    def probe(self, row: int, padding: int, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The probe of one row: queries [H, G, P, d] (fp32) and positions [P] without padding.

        Args:
            row: batch row.
            padding: its left-padding tokens.
            keys: [H, n, d] of the row.
            scale: factor on attention logits.
        """
        positions, queries = self._recent[row]
        others, other_queries, is_boundary = self._other[row]
        boundary = is_boundary.nonzero().flatten()[-self.plan.num_boundary :] if self.plan.num_boundary else others[:0]
        wanted = self.plan.num_queries - positions.shape[0] - boundary.shape[0]
        rest = (~is_boundary & ~torch.isin(others, positions)).nonzero().flatten()
        rest = rest[torch.linspace(0, rest.shape[0] - 1, min(rest.shape[0], 2 * wanted)).long()]
        rest_queries = _grouped(other_queries[:, rest], keys.shape[0])
        entropy = attention_entropy(rest_queries, others[rest] - padding, keys, scale)
        busiest = rest[entropy.topk(min(wanted, rest.shape[0])).indices.cpu()]
        chosen = torch.cat([boundary, busiest])
        queries = torch.cat([other_queries[:, chosen], queries], dim=1)
        return _grouped(queries, keys.shape[0]), torch.cat([others[chosen], positions]) - padding


def _grouped(queries: Tensor, num_kv_heads: int) -> Tensor:
    """[Hq, P, d] -> [H, G, P, d], fp32."""
    return queries.float().unflatten(0, (num_kv_heads, -1))


def attention_entropy(queries: Tensor, positions: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Entropy [P] (nats, mean over heads) of the probe rows."""
    entropy, keys = torch.empty(positions.shape[0]), keys.float()
    for rows, seen in in_strips(positions, _ENTROPY_STRIP):
        weights = attention_rows(queries[:, :, rows], positions[rows], keys[:, :seen], scale)
        # weights that underflow contribute nothing: 0 log 0 = 0
        logs = weights.clamp_min(1e-38).log_()
        entropy[rows] = -logs.mul_(weights).sum(-1).mean((0, 1)).cpu()
    return entropy


@dataclass
class LayerProbe:
    """What the probe found out about one layer of one row.

    Attributes:
        queries: [H, G, P, d], fp32, with the logits' scale multiplied in.
        key_weight: [H, d] > 0: root of the loss that a unit squared error of a key channel causes in one token.
        value_weight: [H] > 0: the same for values.
        token_weight: [H, n]: how much the probe's loss feels a squared logit error of a token.
        key_moment: [H, d, d], the same as `key_weight` for every pair of key channels: an error e costs e'Me. None
            when the channels are taken to be independent.
    """

    queries: Tensor
    key_weight: Tensor
    value_weight: Tensor
    token_weight: Tensor
    key_moment: Tensor | None = None


def probe_layer(
    queries: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    weighting: Weighting,
    floor: float,
    paired: bool = False,
) -> LayerProbe:
    """What errors in keys and values of one layer do to the probe rows.

    With `uniform` the loss is eq. 2's: the mean squared error of the logits, whatever their attention. With
    `attention` a logit error `e` of token t moves a row's output by `p_t e (v_t - o)` (first order), an error of its
    value by `p_t e`; both are taken relative to the output's energy, so that layers and heads can be compared. `mixed`
    takes the geometric mean of the two for each head and token and the mean of their directions: heads that rest on the
    sinks until a question wakes them, and tokens nobody has asked for, weigh next to nothing with `attention`.

    Args:
        queries, positions: the probe, [H, G, P, d] and [P].
        keys, values: [H, n, d].
        scale: factor on attention logits.
        weighting: `attention` or `uniform`.
        floor: smallest channel weight of the keys, as a share of the head's mean (squared).
        paired: the two channels that RoPE turns together get their mean weight (for keys stored before RoPE).
    """
    keys, values = keys.float(), values.float()
    felt = [
        felt_evenly(queries.flatten(1, 2) * scale, keys, values)
        if kind == "uniform"
        else felt_in_output(queries, positions, keys, values, scale)
        for kind in (("uniform", "attention") if weighting == "mixed" else (weighting,))
    ]
    moment, value_weight, token_weight = felt[0] if len(felt) == 1 else between(*felt)
    channel = moment.diagonal(dim1=1, dim2=2)
    if paired:
        first, second = channel.chunk(2, dim=-1)
        channel = ((first + second) / 2).repeat(1, 2)
    least = (floor * channel.mean(-1, keepdim=True)).clamp_min(1e-20)
    full_moment = None if paired else moment + torch.diag_embed(least.expand_as(channel))
    return LayerProbe(queries * scale, (channel + least).sqrt(), value_weight, token_weight, full_moment)

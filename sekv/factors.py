"""Spans as low-rank factors on the host: only the components whose gate survives travel. arXiv 2606.31145, section 3.2.

Legend: B batch rows, Hkv KV heads, N tokens, S spans, s spans of equal length, n tokens of a span, m moved tokens,
r components, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.state import HostState
from kvcore.transfer import HostLink
from sekv.lowrank import Factors, rows_are_cheaper, truncated_svd
from sekv.routing import Router
from sekv.rows import Rows, RowTransfer, TokenStore
from sekv.window import Block, write_columns

SURVIVES = 0.5  # a component whose gate is below does not travel


class FactorStore(HostState):
    """Tokens of long spans as factors, the others as raw rows.

    Attributes:
        raw: rows of the tokens without factors.
        raw_index: int64 [B, N], a token's place in `raw`; -1 when it has factors.
        span_of_token: int64 [B, N], S where there is no span.
        left: [B, Hkv, N, 2, r], gated σ folded in; right: [B, Hkv, S, 2, r, d]; 2 = keys, values.
        ranks: int64 [B, Hkv, S], surviving components (the larger of keys and values); they come first.
        counts: int64 [B], tokens of each row.
        used: N.
    """

    def __init__(
        self,
        raw: TokenStore,
        raw_index: Tensor,
        span_of_token: Tensor,
        left: Tensor,
        right: Tensor,
        ranks: Tensor,
        counts: Tensor,
    ) -> None:
        self.counts = counts
        self.raw, self.raw_index, self.span_of_token = raw, raw_index, span_of_token
        self.left, self.right, self.ranks = left, right, ranks
        self.used = raw_index.shape[1]

    def append(self, rows: Rows, block: Block) -> Tensor:
        """See `TokenStore.append`; new tokens stay raw."""
        row = block.row.cpu()
        token = self.counts[row] + block.column.cpu()
        place = self.raw.append(rows, block).cpu()
        self.raw_index = write_columns(self.raw_index, 1, row, token, place)
        self.counts = self.counts.index_add(0, block.rows.cpu(), block.sizes.cpu())
        self.used = self.raw_index.shape[1]
        return token

    def request(self, head: Tensor, token: Tensor, link: HostLink) -> RowTransfer:
        """See `TokenStore.request`. Left rows of the tokens and right factors of their spans travel, once per span."""
        return RowTransfer(link.request(lambda indices, _: self._lookup(*indices), [head, token]), _rebuilt)

    def _lookup(self, head: Tensor, token: Tensor) -> list[Tensor]:
        """What travels for n tokens: raw rows, left rows [m, 2, r] and right factors [s, 2, r, d] of the others, which
        tokens are raw (bool [n]), and the right factor of each of the others (int32 [m])."""
        place = self.raw_index[head // self.left.shape[1], token]
        is_raw = place >= 0
        width = self.raw.data.shape[2]
        [raw] = self.raw.lookup(head[is_raw] * width + place[is_raw])
        head, token = head[~is_raw], token[~is_raw]
        spans = self.right.shape[2]
        span = self.span_of_token[head // self.left.shape[1], token]
        unique, inverse = torch.unique(head * spans + span, return_inverse=True)
        kept = int(self.ranks.flatten()[unique].max().clamp_min(1)) if unique.numel() else 0
        left = self.left.flatten(0, 2)[head * self.left.shape[2] + token][:, :, :kept].contiguous()
        right = self.right.flatten(0, 2)[unique][:, :, :kept].contiguous()
        return [raw, left, right, is_raw, inverse.to(torch.int32)]


def _rebuilt(found: list[Tensor]) -> Rows:
    """Rows [n, 2 d] of what `FactorStore` sends."""
    raw, left, right, is_raw, factor = found
    data = raw.new_empty(is_raw.shape[0], raw.shape[-1])
    data[is_raw] = raw
    if left.shape[0]:
        data[~is_raw] = (left.unsqueeze(-2) @ right[factor]).flatten(1).to(data.dtype)  # [m, 2, 1, d] before
    return Rows(data, None)


def factorise(
    store: TokenStore, span_of_token: Tensor, num_spans: int, rank: int, router: Router, seed: int, where: str
) -> tuple[FactorStore | TokenStore, Tensor]:
    """Factor the spans that are cheaper as factors.

    Args:
        store: exact rows of every token.
        span_of_token: [B, N], S where there is none.
        num_spans: S.
        rank: most components.
        router: its gates decide which components survive.
        seed: of the randomised SVD.
        where: the layer, for messages.

    Returns:
        The store (the given one when no span is cheaper as factors) and the kept components of each span.
    """
    data = store.data[:, :, : store.used].cpu()
    span_of_token = span_of_token.cpu()
    batch, num_kv_heads, tokens, width = data.shape
    dim = width // 2
    left = data.new_zeros(batch, num_kv_heads, tokens, 2, rank)
    right = data.new_zeros(batch, num_kv_heads, num_spans, 2, rank, dim)
    ranks = torch.zeros(batch, num_kv_heads, num_spans, dtype=torch.int64)
    factored = torch.zeros(batch, tokens, dtype=torch.bool)
    for row in range(batch):
        lengths = torch.bincount(span_of_token[row], minlength=num_spans + 1)[:num_spans]
        for length in lengths.unique().tolist():  # spans of equal length are one batched SVD
            if length == 0 or rows_are_cheaper(length, dim, rank):
                continue
            spans = (lengths == length).nonzero().flatten()
            place = torch.stack([(span_of_token[row] == span).nonzero().flatten() for span in spans])  # [s, n]
            matrices = data[row][:, place].unflatten(-1, (2, dim)).movedim(-2, 2)  # [Hkv, s, 2, n, d]
            message = f"{where}, row {row}, spans {spans[:4].tolist()}..."
            lefts, rights, kept = _gated(truncated_svd(matrices, rank, seed, message), matrices, router)
            size = lefts.shape[-1]
            left[row, :, place, :, :size] = lefts.movedim(2, 3).to(left.dtype)
            right[row, :, spans, :, :size] = rights.to(right.dtype)
            ranks[row, :, spans] = kept
            factored[row, place.flatten()] = True
    if not bool(factored.any()):
        return store, ranks[..., :0]
    return _with_raw(store, factored, span_of_token, left, right, ranks), ranks[ranks > 0]


def _gated(factors: Factors, matrices: Tensor, router: Router) -> tuple[Tensor, Tensor, Tensor]:
    """Left factors with gated σ [Hkv, s, 2, n, r], right factors [Hkv, s, 2, r, d], surviving ranks [Hkv, s]."""
    means = matrices[:, :, :1].float().mean(dim=-2).expand(*factors.sigma.shape[:-1], -1)  # both gates see k̄
    gates = router.rank_gates(factors.sigma, means)
    survives = (gates >= SURVIVES) & (factors.sigma > 0)
    order = (~survives).to(torch.int8).argsort(dim=-1, stable=True)
    scale = (factors.sigma * gates * survives).gather(-1, order)
    left = factors.left.gather(-1, order.unsqueeze(-2).expand_as(factors.left)) * scale.unsqueeze(-2)
    right = factors.right.gather(-2, order.unsqueeze(-1).expand_as(factors.right))
    return left, right, survives.sum(-1).amax(-1)


def _with_raw(
    store: TokenStore, factored: Tensor, span_of_token: Tensor, left: Tensor, right: Tensor, ranks: Tensor
) -> FactorStore:
    """The factors beside a compact store of the other tokens."""
    counts = (~factored).sum(1)
    place = (~factored).long().cumsum(1) - 1
    index = place.masked_fill(factored, -1)
    data = store.data.new_zeros(*store.data.shape[:2], int(counts.max()), store.data.shape[3])
    for row in range(factored.shape[0]):
        data[row, :, : int(counts[row])] = store.data[row, :, : store.used][:, ~factored[row].to(store.data.device)]
    raw = type(store)(Rows(data, None), counts)
    return FactorStore(raw, index, span_of_token, left, right, ranks, store.counts.cpu())

"""Moving the wanted tokens of one step from the host into the expansion buffer: asked for, then waited for.

Legend: B batch rows, Hkv KV heads, N tokens of the map, M columns of the buffer in use, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.transfer import HostLink
from sekv.factors import FactorStore
from sekv.rows import Rows, RowTransfer, TokenStore
from sekv.shared import ExpansionBuffer

WIDTH_STEP = 16  # columns in use are a multiple of this


@dataclass
class Fetching:
    """What one step has asked for. Columns of a KV head are in order of the query that wants them first, then of the
    text.

    Attributes:
        token: int64 [B, Hkv, M], N at padding.
        padding: bool [B, Hkv, M].
        head, column, moved_token: [n], where each row goes: flat KV head b * Hkv + h, column, token.
        newest: [n], the column counted from the last one back.
        transfer: the rows under way.
    """

    token: Tensor
    padding: Tensor
    head: Tensor
    column: Tensor
    newest: Tensor
    moved_token: Tensor
    transfer: RowTransfer

    @property
    def count(self) -> int:
        """n, over all rows and KV heads."""
        return self.head.shape[0]

    def arrive(self, buffer: ExpansionBuffer) -> Fetched:
        """Wait for the rows and put them into the buffer."""
        moved, moved_bytes = self.transfer.arrive()
        return Fetched(self, buffer.place(moved, self.head, self.column, self.token.shape[2]), moved, moved_bytes)


@dataclass
class Fetched:
    """What has come.

    Attributes:
        asked: what was asked for.
        rows: [B, Hkv, M, 2 d] in storage form, in the buffer.
        moved: the same rows one after another, [n, 2 d].
        moved_bytes: bytes that travelled.
    """

    asked: Fetching
    rows: Rows
    moved: Rows
    moved_bytes: int


def fetch(
    want: Tensor,
    first: Tensor | None,
    room: Tensor,
    limits: tuple[int, int],
    store: TokenStore | FactorStore,
    link: HostLink,
) -> Fetching | None:
    """Ask for the wanted tokens, the most wanted where they do not all fit.

    Args:
        want: [B, Hkv, N], wanted where >= 1, the larger the more.
        first: int64 [B, Hkv, N], the first query of the step that wants each token; None for a step of one query.
        room: int64 [B], most tokens per KV head of each row.
        limits: the smallest and the largest of `room`.
        store: where the rows are.
        link: how they come.

    Returns:
        None when nothing is wanted.
    """
    smallest, largest = limits
    wanted = want >= 1
    counts = wanted.sum(-1)
    widest = int(counts.amax()) if largest else 0
    if widest > smallest:
        wanted = _most_wanted(want, room, min(largest, want.shape[-1]))
        counts = wanted.sum(-1)
        widest = int(counts.amax())
    if widest == 0:
        return None
    head, token = wanted.flatten(0, 1).nonzero(as_tuple=True)
    if first is not None:
        turn = first.flatten(0, 1)[head, token]
        order = (head * (int(turn.max()) + 1) + turn).argsort(stable=True)
        head, token = head[order], token[order]
    # a row's arithmetic must not depend on what other rows fetch
    width = min(-(-widest // WIDTH_STEP) * WIDTH_STEP, largest, want.shape[-1])
    counts = counts.flatten()
    column = torch.arange(head.shape[0], device=want.device) - (counts.cumsum(0) - counts)[head]
    padding = torch.arange(width, device=want.device) >= counts.view(*want.shape[:2], 1)
    padded = torch.full((*want.shape[:2], width), want.shape[-1], device=want.device)
    padded.view(-1).index_copy_(0, head * width + column, token)
    newest = counts[head] - 1 - column
    return Fetching(padded, padding, head, column, newest, token, store.request(head, token, link))


def _most_wanted(want: Tensor, room: Tensor, most: int) -> Tensor:
    """[B, Hkv, N] bool, the `room` [B] largest of `want` that are >= 1; `most` is the largest room."""
    best, order = want.topk(most, dim=-1)
    live = (best >= 1) & (torch.arange(most, device=want.device) < room[:, None, None])
    return torch.zeros_like(want, dtype=torch.bool).scatter_(-1, order, live)

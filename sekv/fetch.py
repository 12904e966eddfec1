"""Moving the wanted tokens of one step from the host into the expansion buffer.

Legend: B batch rows, Hkv KV heads, N tokens of the map, M columns of the buffer in use, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sekv.factors import FactorStore
from sekv.rows import Rows, TokenStore
from sekv.shared import ExpansionBuffer

WIDTH_STEP = 16  # columns in use are a multiple of this: a row's arithmetic does not depend on another row's fetches


@dataclass
class Fetched:
    """What one step fetched.

    Attributes:
        rows: [B, Hkv, M, 2 d] in storage form.
        token: int64 [B, Hkv, M], N at padding.
        padding: bool [B, Hkv, M].
        moved: the same rows one after another, [n, 2 d].
        head, column, moved_token: [n], where each of them is: flat KV head b * Hkv + h, column, token.
        moved_bytes: bytes that travelled.
    """

    rows: Rows
    token: Tensor
    padding: Tensor
    moved: Rows
    head: Tensor
    column: Tensor
    moved_token: Tensor
    moved_bytes: int

    @property
    def count(self) -> int:
        """n, over all rows and KV heads."""
        return self.head.shape[0]


def fetch(
    want: Tensor, room: Tensor, limits: tuple[int, int], store: TokenStore | FactorStore, buffer: ExpansionBuffer
) -> Fetched | None:
    """Fetch the wanted tokens, the most wanted first where they do not all fit.

    Args:
        want: [B, Hkv, N], wanted where >= 1, the larger the more.
        room: int64 [B], most tokens per KV head of each row.
        limits: the smallest and the largest of `room`.
        store: where the rows are.
        buffer: where they go.

    Returns:
        None when nothing is wanted.
    """
    smallest, largest = limits
    wanted = want >= 1
    head, token = wanted.flatten(0, 1).nonzero(as_tuple=True)
    if head.shape[0] == 0 or largest == 0:
        return None
    counts = wanted.sum(-1)
    widest = int(counts.amax())
    width = min(-(-widest // WIDTH_STEP) * WIDTH_STEP, largest, want.shape[-1])
    columns = torch.arange(width, device=want.device)
    if widest <= smallest:
        first = counts.flatten().cumsum(0) - counts.flatten()
        column = torch.arange(head.shape[0], device=want.device) - first[head]
        padding = columns >= counts.unsqueeze(-1)
    else:
        best, order = want.topk(width, dim=-1)
        live = (best >= 1) & (columns < room[:, None, None])
        # rows in which all fits keep the order of the text, as they do alone
        in_order = order.masked_fill(~live, want.shape[-1]).sort(dim=-1).values
        order = torch.where((counts <= room[:, None]).unsqueeze(-1), in_order, order)
        head, column = live.flatten(0, 1).nonzero(as_tuple=True)
        token, padding = order.flatten(0, 1)[head, column], ~live
    moved, moved_bytes = store.fetch(head, token, want.device)
    padded = torch.full((*want.shape[:2], width), want.shape[-1], device=want.device)
    padded.view(-1).index_copy_(0, head * width + column, token)
    rows = buffer.place(moved, head, column, width)
    return Fetched(rows, padded, padding, moved, head, column, token, moved_bytes)

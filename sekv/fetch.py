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
        live: bool [B, Hkv, M].
        count: tokens fetched, over all rows and KV heads.
        moved_bytes: bytes that travelled.
    """

    rows: Rows
    token: Tensor
    live: Tensor
    count: int
    moved_bytes: int


def fetch(
    want: Tensor, room: Tensor, largest: int, store: TokenStore | FactorStore, buffer: ExpansionBuffer
) -> Fetched | None:
    """Fetch the wanted tokens, the most wanted first where they do not all fit.

    Args:
        want: [B, Hkv, N], wanted where >= 0, the larger the more.
        room: int64 [B], most tokens per KV head of each row.
        largest: the largest of `room`.
        store: where the rows are.
        buffer: where they go.

    Returns:
        None when nothing is wanted.
    """
    wanted = want >= 0
    counts = wanted.sum(-1)
    width = int(counts.max()) if want.shape[-1] else 0
    if width == 0 or largest == 0:
        return None
    fits = width <= largest and bool((counts <= room[:, None]).all())
    width = min(-(-width // WIDTH_STEP) * WIDTH_STEP, largest, want.shape[-1])
    columns = torch.arange(width, device=want.device)
    if fits:
        head, moved = wanted.flatten(0, 1).nonzero(as_tuple=True)
        first = counts.flatten().cumsum(0) - counts.flatten()
        rank = torch.arange(head.shape[0], device=want.device) - first[head]
        live = columns < counts.unsqueeze(-1)
    else:
        best, order = want.topk(width, dim=-1)
        live = (best >= 0) & (columns < room[:, None, None])
        head, rank = live.flatten(0, 1).nonzero(as_tuple=True)
        moved = order.flatten(0, 1)[head, rank]
    rows, moved_bytes = store.fetch(head, moved, want.device)
    token = torch.full((*want.shape[:2], width), store.used, device=want.device)
    token.flatten(0, 1)[head, rank] = moved
    return Fetched(buffer.place(rows, head, rank, width), token, live, head.shape[0], moved_bytes)

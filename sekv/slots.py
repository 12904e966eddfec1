"""Full-resolution tokens on the device: pinned ones (sinks, anchors, outliers) and the byte-bounded factor cache.

At a small budget a query wants more tokens than the cache holds. Keeping the latest would then drop in every step what
the step before brought; so a slot is kept by how often it was used of late, and a token that was in use is never given
up for one that is merely new.

Legend: B batch rows, Hkv KV heads, C slots, n rows put in, d head dimension, N tokens of the map.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore.state import BatchedState
from sekv.rows import RowCodec, Rows, put_rows_
from sekv.window import widened

PINNED = float("inf")
EMPTY = float("-inf")
DECAY = 0.7  # of a slot's count of uses, per step
FRESH = 1.0  # the count of a token that has just come: only slots used less give way to it
MOST_TOKENS = 2**24  # of a row: where ranks are equal, to less than one use, the token decides; exact in fp64


class Slots(BatchedState):
    """C slots per KV head. The least used of late is given up first.

    Attributes:
        data, scale: rows in storage form (see `rows.Rows`), [B, Hkv, C, 2 d] and [B, Hkv, C, 1] or None.
        token: int32 [B, Hkv, C], the token held; -1 when empty.
        rank: fp32 [B, Hkv, C]: decayed count of uses; +inf pinned or not available to this row, -inf empty.
        holes: whether some slot may be empty or not available.
    """

    def __init__(self, rows: Rows, token: Tensor, rank: Tensor) -> None:
        self.data, self.scale = rows.data, rows.scale
        self.token, self.rank = token.to(torch.int32), rank
        self._inspect()

    def _inspect(self) -> None:
        self.holes = bool((self.token < 0).any())

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self._inspect()

    @property
    def count(self) -> int:
        """C."""
        return self.token.shape[2]

    @property
    def rows(self) -> Rows:
        """[B, Hkv, C, 2 d]."""
        return Rows(self.data, self.scale)

    def decode(self, codec: RowCodec) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, C, d]."""
        return codec.decode(self.rows)

    def hidden(self) -> Tensor | None:
        """[B, Hkv, 1, C] bool, True at slots without a token; None when every slot holds one."""
        return (self.token < 0).unsqueeze(2) if self.holes else None

    def token_index(self, nowhere: int) -> Tensor:
        """int64 [B, Hkv, C]: the token of every slot, `nowhere` for empty slots and for tokens beyond."""
        index = self.token.long().clamp_max(nowhere)
        return index.masked_fill(index < 0, nowhere) if self.holes else index

    def _order(self) -> Tensor:
        """fp64 [B, Hkv, C]: `rank`, and the token where ranks are equal, so that a row does not depend on its batch."""
        return self.rank.double().mul_(MOST_TOKENS).add_(self.token)

    def use(self, used: Tensor | None, steps: int) -> None:
        """Count the slots `used` [B, Hkv, C] (bool) in these `steps`; older uses fade, so that of tokens that nobody
        counts the latest stay."""
        rank = self.rank * DECAY**steps  # pinned ones stay at infinity
        self.rank = rank if used is None else rank + used

    def put(self, rows: Rows, head: Tensor, place: Tensor, token: Tensor, width: int) -> None:
        """Store n fetched rows over slots of less use than a fresh token; what finds no slot is dropped.

        Args:
            rows: data [n, 2 d].
            head: [n] flat index b * Hkv + h.
            place: [n], each row's turn among those of its KV head, from 0.
            token: [n].
            width: largest turn + 1.
        """
        free = (self.rank < FRESH).sum(-1)
        count = min(width, int(free.amax())) if self.count else 0
        if count == 0:
            return
        slot = self._order().topk(count, dim=-1, largest=False).indices
        kept = (place < free.flatten()[head]).nonzero().flatten()
        head, place, token = head[kept], place[kept], token[kept]
        index = head * self.count + slot.flatten(0, 1)[head, place]
        put_rows_(self.data, index, rows.data[kept])
        if self.scale is not None and rows.scale is not None:
            put_rows_(self.scale, index, rows.scale[kept])
        self.token.view(-1).index_copy_(0, index, token.to(torch.int32))
        self.rank.view(-1).index_fill_(0, index, FRESH)
        if self.holes:
            self.holes = bool((self.token < 0).any())

    def resize(self, capacity: list[int]) -> None:
        """Make `capacity[row]` slots available to every row; new ones are empty, the lowest ranks are given up."""
        width = max(capacity)
        if any(held > limit for held, limit in zip(self._available(), capacity, strict=True)):
            self._keep_best(min(width, self.count))
        if width > self.count:
            extra = width - self.count
            self.data = widened(self.data, 2, extra)
            self.scale = None if self.scale is None else widened(self.scale, 2, extra)
            self.token = _grown(self.token, extra, -1)
            self.rank = _grown(self.rank, extra, PINNED)
        limit = torch.tensor(capacity, device=self.rank.device)[:, None, None]
        available = torch.arange(self.count, device=self.rank.device) < limit
        self.token = self.token.masked_fill(~available, -1)
        self.rank = self.rank.masked_fill(self.token < 0, EMPTY).masked_fill(~available, PINNED)
        self._inspect()

    def _available(self) -> list[int]:
        """Slots available to each row."""
        taken = (self.token[:, 0] < 0) & (self.rank[:, 0] == PINNED) if self.count else self.token[:, 0]
        return [self.count - int(row.sum()) for row in taken]

    def _keep_best(self, width: int) -> None:
        """Reorder by falling rank, empty slots last, and keep `width` slots."""
        order = self._order().masked_fill(self.token < 0, EMPTY).argsort(dim=-1, descending=True, stable=True)
        order = order[..., :width]
        self.token, self.rank = self.token.gather(-1, order), self.rank.gather(-1, order)
        rows = order.unsqueeze(-1)
        self.data = self.data.gather(2, rows.expand(*order.shape, self.data.shape[3]))
        if self.scale is not None:
            self.scale = self.scale.gather(2, rows)

    @staticmethod
    def slot_bytes(row_bytes: int) -> int:
        """Bytes of one slot: its row, token number and rank."""
        return row_bytes + 8


def _grown(tensor: Tensor, extra: int, fill: float) -> Tensor:
    """[B, Hkv, C] with `extra` columns more."""
    return torch.cat([tensor, tensor.new_full((*tensor.shape[:2], extra), fill)], dim=2)

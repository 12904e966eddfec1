"""Token rows (key and value side by side) as they are kept on the host, moved, and cached on the device.

Legend: B batch rows, Hkv KV heads, N tokens, n moved tokens, d head dimension, r kept rank, S spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcore.state import BatchedState, HostState
from kvcore.transfer import HostLink, Transfer
from sekv.attention import Entries
from sekv.window import Block, widened, write_columns

ROW_BITS = (0, 8)
KEY_HEADROOM = 1.25  # later keys may exceed the prompt's range by this much before they are clipped
SCALE_BYTES = 2
WORD_BYTES = 8


@dataclass
class Rows:
    """Some rows in storage form.

    Attributes:
        data: [..., 2 d], key then value: int8 codes, or the model's dtype.
        scale: [..., 1] of the value codes (fp16); None when the rows are exact.
    """

    data: Tensor
    scale: Tensor | None

    def map(self, fn: object) -> Rows:
        """`fn` applied to both tensors."""
        return Rows(fn(self.data), None if self.scale is None else fn(self.scale))  # type: ignore[operator]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


def put_rows_(target: Tensor, index: Tensor, rows: Tensor) -> None:
    """Copy rows [n, x] into target [..., x] at flat indices [n]; 8 bytes count as one number, for speed."""
    flat = target.view(-1, target.shape[-1])
    if flat.shape[-1] * flat.itemsize % WORD_BYTES == 0:
        flat, rows = flat.view(torch.int64), rows.contiguous().view(torch.int64)
    flat.index_copy_(0, index, rows)


class RowCodec(BatchedState):
    """8-bit rows: keys with one step per channel, values with one per token; or exact rows.

    Attributes:
        key_step: [B, Hkv, d] fp32; None when rows are exact.
    """

    def __init__(self, keys: Tensor, bits: int) -> None:
        """Fit the key steps to the prompt's keys [B, Hkv, N, d]; bits 0 means exact rows."""
        self.dtype = keys.dtype
        self.key_step: Tensor | None = None
        if bits:
            top = keys.float().abs().amax(dim=2) if keys.shape[2] else keys.new_ones(keys.shape[0], keys.shape[1], 1)
            self.key_step = (top * KEY_HEADROOM / 127).clamp_min(1e-8)

    def encode(self, keys: Tensor, values: Tensor, rows: Tensor | None = None) -> Rows:
        """Rows [B, Hkv, n, 2 d] of keys and values [B, Hkv, n, d]; of the batch rows `rows` alone where given."""
        if self.key_step is None:
            return Rows(torch.cat([keys, values], dim=-1), None)
        key_step = self.key_step if rows is None else self.key_step[rows]
        key_codes = keys.float() / key_step.unsqueeze(2)
        scale = (values.float().abs().amax(dim=-1, keepdim=True) / 127).clamp_min(1e-6).to(torch.float16)
        data = torch.cat([key_codes, values.float() / scale.float()], dim=-1)
        return Rows(data.round_().clamp_(-127, 127).to(torch.int8), scale)

    def decode(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, n, d] in the model's dtype."""
        keys, values = rows.data.chunk(2, dim=-1)
        if self.key_step is None or rows.scale is None:
            return keys, values
        return (
            keys.to(self.dtype) * self.key_step.unsqueeze(2).to(self.dtype),
            values.to(self.dtype) * rows.scale.to(self.dtype),
        )

    def fold(self, query: Tensor) -> Tensor:
        """Queries [B, Hq, Q, d] that, times the stored numbers of keys, give the logits: no key needs decoding."""
        if self.key_step is None:
            return query
        return (query.unflatten(1, (self.key_step.shape[1], -1)) * self.key_step[:, :, None, None]).flatten(1, 2)

    @staticmethod
    def numbers(rows: Rows) -> tuple[Tensor, Entries]:
        """The stored numbers of rows [B, Hkv, n, 2 d] in fp32: keys [B, Hkv, n, d] (see `fold`) and values."""
        keys, values = rows.data.float().chunk(2, dim=-1)
        return keys, Entries(values, None if rows.scale is None else rows.scale.mT)

    @staticmethod
    def row_bytes(head_dim: int, itemsize: int, bits: int) -> int:
        """Bytes of one row."""
        return 2 * head_dim * itemsize if bits == 0 else 2 * head_dim + SCALE_BYTES


@dataclass
class RowTransfer:
    """Rows that a step has asked for.

    Attributes:
        transfer: what is under way.
        rows: makes rows [n, 2 d] of what has come.
    """

    transfer: Transfer
    rows: Callable[[list[Tensor]], Rows]

    def arrive(self) -> tuple[Rows, int]:
        """Rows [n, 2 d] on the device, and the bytes that were moved."""
        found = self.transfer.arrive()
        return self.rows(found), sum(tensor.nbytes for tensor in found)


class TokenStore(BatchedState):
    """Every token's row [B, Hkv, N, 2 d].

    Args:
        rows: the rows.
        counts: int64 [B], tokens of each batch row.

    Attributes:
        used: N, tokens of the longest batch row so far; room beyond it is not in use.
    """

    on_host: ClassVar[bool] = False

    def __init__(self, rows: Rows, counts: Tensor) -> None:
        self.data, self.scale = self._placed(rows.data), None if rows.scale is None else self._placed(rows.scale)
        self.counts = counts.to(self.data.device)
        self.used = rows.data.shape[2]

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    def append(self, rows: Rows, block: Block) -> Tensor:
        """Add the tokens of a block, in storage form [m, Hkv, b, 2 d]; returns their numbers [n].

        Room is made in larger steps, so that growing does not copy the store every time.
        """
        row, taken = block.row.to(self.data.device), block.rows.to(self.data.device)
        token = self.counts[row] + block.column.to(self.data.device)
        self.used = max(self.used, int(token.max()) + 1)
        missing = self.used - self.data.shape[2]
        if missing > 0:
            room = max(missing, self.data.shape[2] // 8)
            self.data = self._placed(widened(self.data, 2, room))
            self.scale = None if self.scale is None else self._placed(widened(self.scale, 2, room))
        write_columns(self.data, 2, row, token, rows.data[block.member, :, block.column])
        if self.scale is not None and rows.scale is not None:
            write_columns(self.scale, 2, row, token, rows.scale[block.member, :, block.column])
        self.counts = self.counts.index_add(0, taken, block.sizes.to(self.counts.device))
        return token

    def all_rows(self, device: torch.device) -> Rows:
        """Every row [B, Hkv, N, 2 d] on `device`."""
        data = self.data[:, :, : self.used].to(device)
        return Rows(data, None if self.scale is None else self.scale[:, :, : self.used].to(device))

    def request(self, head: Tensor, token: Tensor, link: HostLink) -> RowTransfer:
        """Ask for the rows [n, 2 d] of n tokens.

        Args:
            head: [n] flat index b * Hkv + h.
            token: [n].
            link: the way to the device of the indices.
        """
        index = head * self.data.shape[2] + token
        transfer = link.request(lambda indices, _: self.lookup(indices[0]), [index], from_host=self.on_host)
        return RowTransfer(transfer, lambda found: Rows(found[0], found[1] if len(found) > 1 else None))

    def lookup(self, index: Tensor) -> list[Tensor]:
        """Data [n, 2 d], and scales where there are any, at flat indices (b * Hkv + h) * N + token."""
        kept = [self.data] if self.scale is None else [self.data, self.scale]
        return [tensor.flatten(0, 2).index_select(0, index) for tensor in kept]


class HostTokenStore(TokenStore, HostState):
    """A token store in host memory."""

    on_host: ClassVar[bool] = True

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu").contiguous()


def make_store(rows: Rows, offload: bool, counts: Tensor) -> TokenStore:
    """The store of one layer; without offload it stays on the device (and counts there)."""
    return HostTokenStore(rows, counts) if offload else TokenStore(rows, counts)

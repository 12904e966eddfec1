"""Where a retrieval method keeps tokens: sinks and window on the device, the rest grouped by unit on the host, and the
fetch buffer that all layers share.

Legend: B batch rows, Hkv KV heads, S sinks, W window slots, H stored tokens, K fetched tokens, R rows written,
c tokens written, m tokens reordered, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcore.state import BatchedState, HostState
from kvcore.transfer import HostLink, Transfer

Part = tuple[Tensor, Tensor, "Tensor | None"]
HOST_GROWTH = 256  # host slots added at a time, so that a decode step does not copy the host store


class Resident(BatchedState):
    """Sinks and window of one layer, exact.

    Attributes:
        sinks: keys and values [B, Hkv, S, d], rows with fewer filled from the left.
        window: keys and values [B, Hkv, W, d], rows with fewer filled from the right.
        sink_counts, counts: [B] tokens of each row in `sinks` and `window`.
    """

    host_fields = frozenset({"sink_counts", "counts"})

    def __init__(self, rows: list[tuple[Tensor, Tensor]], num_sinks: list[int], num_window: list[int]) -> None:
        """Take the first and last tokens of each row's prompt, keys and values [Hkv, n, d]."""
        first = [[pair[i][:, :count] for pair, count in zip(rows, num_sinks, strict=True)] for i in (0, 1)]
        last = [
            [pair[i][:, pair[i].shape[1] - count :] for pair, count in zip(rows, num_window, strict=True)]
            for i in (0, 1)
        ]
        self.sinks = (stack(first[0]), stack(first[1]))
        self.window = (stack(last[0], left=True), stack(last[1], left=True))
        self.sink_counts, self.counts = torch.tensor(num_sinks), torch.tensor(num_window)

    @property
    def mean_count(self) -> float:
        """Mean tokens per row."""
        return float((self.sink_counts + self.counts).float().mean())

    def push(self, key: Tensor, value: Tensor) -> None:
        """Append one token [B, Hkv, 1, d] to every window."""
        free = self.window[0].shape[2] - int(self.counts.max())
        keys, values = self.window
        self.window = (torch.cat([keys[:, :, free:], key], dim=2), torch.cat([values[:, :, free:], value], dim=2))
        self.counts = self.counts + 1

    def oldest(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Take the oldest `count` tokens [R, Hkv, c, d] out of the windows of `rows` [R]."""
        slots = (self.window[0].shape[2] - self.counts[rows])[:, None] + torch.arange(count)
        keys, values = (tensor[rows[:, None], :, slots].transpose(1, 2) for tensor in self.window)
        self.counts = self.counts.index_add(0, rows, torch.full_like(rows, -count))
        return keys, values

    def parts(self) -> list[Part]:
        """As attention parts: sinks if there are any, then the window."""
        device = self.window[0].device
        num_sinks, width = self.sinks[0].shape[2], self.window[0].shape[2]
        beyond = torch.arange(num_sinks) >= self.sink_counts[:, None]
        before = torch.arange(width) < width - self.counts[:, None]
        parts: list[Part] = []
        for (keys, values), mask in ((self.sinks, beyond), (self.window, before)):
            bias = hide(mask[:, None].to(device)) if bool(mask.any()) else None
            if keys.shape[2]:
                parts.append((keys, values, bias))
        return parts


class TokenStore(BatchedState):
    """Keys and values [B, Hkv, H, d] grouped by unit; the first `counts[row]` slots of a row are filled."""

    host_fields = frozenset({"counts"})

    def __init__(self, keys: Tensor, values: Tensor, counts: Tensor) -> None:
        self.keys, self.values, self.counts = keys, values, counts

    def write(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Append c tokens [R, Hkv, c, d] to the rows `rows` [R]."""
        count = keys.shape[2]
        extra = int(self.counts[rows].max()) + count - self.keys.shape[2]
        if extra > 0:
            room = (*self.keys.shape[:2], max(extra, HOST_GROWTH), self.keys.shape[3])
            self.keys = torch.cat([self.keys, self.keys.new_zeros(room)], dim=2)
            self.values = torch.cat([self.values, self.values.new_zeros(room)], dim=2)
        slots = self.counts[rows, None] + torch.arange(count)
        self.keys[rows[:, None], :, slots] = keys.transpose(1, 2).to(self.keys.device)
        self.values[rows[:, None], :, slots] = values.transpose(1, 2).to(self.values.device)
        self.counts[rows] += count

    def reorder_last(self, row: int, order: Tensor) -> None:
        """Put the last m tokens of a row into another order, [Hkv, m], per head."""
        last = slice(int(self.counts[row]) - order.shape[1], int(self.counts[row]))
        index = order.to(self.keys.device).unsqueeze(-1).expand(-1, -1, self.keys.shape[3])
        self.keys[row, :, last] = self.keys[row, :, last].gather(1, index)
        self.values[row, :, last] = self.values[row, :, last].gather(1, index)

    def lookup(self, indices: Sequence[Tensor], out: Sequence[Tensor] | None) -> list[Tensor]:
        """Keys and values [B, Hkv, K, d] of slots [B, Hkv, K]. See `kvcore.transfer.Gather`."""
        [index] = indices
        flat, dim = self.flat_index(index), self.keys.shape[3]
        targets = out or [kept.new_empty(*index.shape, dim) for kept in (self.keys, self.values)]
        for kept, target in zip((self.keys, self.values), targets, strict=True):
            torch.index_select(kept.reshape(-1, dim), 0, flat, out=target.view(-1, dim))
        return list(targets)

    def flat_index(self, index: Tensor) -> Tensor:
        """Slots [B, Hkv, K] as rows of the flattened store."""
        base = torch.arange(index.shape[0] * index.shape[1], device=self.keys.device) * self.keys.shape[2]
        return (index.to(self.keys.device) + base.view(*index.shape[:2], 1)).flatten()


class HostStore(TokenStore, HostState):
    """A token store in host memory."""


class Workspace(BatchedState):
    """The fetch buffer [B, Hkv, K, d], overwritten by each layer in turn: counted once."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def reserve(self, shape: tuple[int, ...], like: Tensor) -> None:
        """Make the buffer [B, Hkv, K, d] that the next step needs, on the device of `like`."""
        if self.keys is None or self.keys.shape != shape:
            self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)

    def request(self, host: TokenStore, index: Tensor, like: Tensor, link: HostLink) -> Transfer:
        """Ask for the stored tokens `index` [B, Hkv, K]; keys and values [B, Hkv, K, d] arrive in the buffer."""
        self.reserve((*index.shape, host.keys.shape[3]), like)
        assert self.keys is not None and self.values is not None
        on_host = isinstance(host, HostStore)
        return link.request(host.lookup, [index], [self.keys, self.values], from_host=on_host)


class Shared:
    """Holds what the layers share, out of reach of the walk over each layer's tensors."""

    def __init__(self) -> None:
        self.workspace, self.link = Workspace(), HostLink()


def hide(mask: Tensor) -> Tensor:
    """Additive bias [B, Hkv or 1, 1, 1, N] from a mask [B, Hkv or 1, N] of what to hide."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, float("-inf"))[:, :, None, None]


def widen(tensor: Tensor, extra: int) -> Tensor:
    """[B, Hkv, U, ...] -> [B, Hkv, U + extra, ...], zeros."""
    return torch.cat([tensor, tensor.new_zeros(*tensor.shape[:2], extra, *tensor.shape[3:])], dim=2)


def stack(tensors: list[Tensor], left: bool = False) -> Tensor:
    """[Hkv, x, ...] of each row -> [B, Hkv, max x, ...], zeros after (or before) the shorter ones."""
    width = max(t.shape[1] for t in tensors)
    out = tensors[0].new_zeros(len(tensors), tensors[0].shape[0], width, *tensors[0].shape[2:])
    for row, tensor in enumerate(tensors):
        start = width - tensor.shape[1] if left else 0
        out[row, :, start : start + tensor.shape[1]] = tensor
    return out

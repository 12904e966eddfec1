"""Quantised tokens of one layer in KIVI's layout: old keys per channel, old values per token, the newest exact.

Rows of a batch may differ in length, so every count is per row; a row of length 0 is not in this store.
Legend: B batch rows, H KV heads, n tokens of a row, R residual length, N quantised slots, W window slots, G groups,
P packed bytes of one group, Q new tokens, Hq query heads, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.baselines.codec import CodecSetting, CodecStore
from kvcore.baselines.retrieval_store import hide
from kvcore.budget import ModelSpec
from kvcore.kernels import decode_attention
from kvcore.quant import Along, QuantizedTensor, packed_bytes, quantize, quantized_bytes
from kvcore.state import BatchedState

BLOCK_TOKENS = 1024  # tokens dequantised at a time
UNBOUNDED = 1 << 40  # residual length of the setting that quantises nothing


@dataclass(frozen=True)
class Setting(CodecSetting):
    """How tokens are quantised: bits per code, entries per scale, and R newest tokens left exact."""

    bits: int
    group_size: int
    residual: int

    def value_group(self, dim: int) -> int:
        """Channels that share a scale of a value: never more than d, in multiples of 8."""
        return min(self.group_size, -(-dim // 8) * 8)

    def bytes(self, tokens: int, spec: ModelSpec) -> float:
        exact_keys, exact_values = self.exact(tokens)
        dim = spec.head_dim
        keys = quantized_bytes(tokens - exact_keys, dim, self.bits, self.group_size, "tokens")
        values = quantized_bytes(tokens - exact_values, dim, self.bits, self.value_group(dim), "channels")
        exact = (exact_keys + exact_values) * dim * spec.dtype.itemsize
        return spec.num_kv_heads * (keys + values + exact)

    def exact(self, tokens: int) -> tuple[int, int]:
        """Newest keys and values left exact: n mod R and min(R, n)."""
        return tokens % self.residual, min(self.residual, tokens)

    def fullest(self, tokens: int) -> int:
        return tokens + self.residual - 1 - tokens % self.residual

    def make_store(self, spec: ModelSpec, batch: int, like: Tensor) -> KiviStore:
        return KiviStore(self, batch, like)


class Recent(BatchedState):
    """The newest tokens [B, H, W, d], right-aligned; `counts` [B] of them are a row's."""

    host_fields = frozenset({"counts"})

    def __init__(self, tokens: Tensor, counts: Tensor) -> None:
        self.tokens, self.counts = tokens, counts

    def push(self, new: Tensor, active: Tensor) -> None:
        """Append [B, H, Q, d]; rows that are not `active` [B] take nothing."""
        free = self.tokens.shape[2] - int(self.counts.max())
        self.tokens = torch.cat([self.tokens[:, :, free:], new], dim=2)
        self.counts = torch.where(active, self.counts + new.shape[2], 0)

    def oldest(self, rows: Tensor, count: int) -> Tensor:
        """Take the oldest `count` tokens [r, H, count, d] out of `rows` [r]."""
        slots = (self.tokens.shape[2] - self.counts[rows])[:, None] + torch.arange(count)
        taken = self.tokens[rows[:, None], :, slots].transpose(1, 2)
        self.counts = self.counts.index_add(0, rows, torch.full_like(rows, -count))
        return taken

    def trim(self) -> None:
        """Give back the slots that no row fills."""
        free = self.tokens.shape[2] - int(self.counts.max())
        if free:
            self.tokens = self.tokens[:, :, free:].clone()


class KiviStore(CodecStore):
    """Keys and values of the rows that share one setting.

    Attributes:
        lengths: [B] tokens of each row.
        keys: quantised along tokens in whole blocks of R; values: quantised along channels.
        key_tail, value_tail: the exact newest tokens.
    """

    def __init__(self, setting: Setting, batch: int, like: Tensor) -> None:
        num_heads, dim = like.shape[-3], like.shape[-1]
        self.setting, self.dim = setting, dim
        self.lengths = torch.zeros(batch, dtype=torch.long)
        empty = like.new_zeros(batch, num_heads, 0, dim)
        self.key_tail = Recent(empty, torch.zeros(batch, dtype=torch.long))
        self.value_tail = Recent(empty.clone(), torch.zeros(batch, dtype=torch.long))
        self.keys = _empty(batch, num_heads, dim, setting.bits, setting.group_size, "tokens", like.device)
        group = setting.value_group(dim)
        self.values = _empty(batch, num_heads, dim, setting.bits, group, "channels", like.device)

    # --- writing
    def append(self, keys: Tensor, values: Tensor, active: Tensor) -> None:
        """Store new tokens exactly, then quantise what has become old enough."""
        residual = self.setting.residual
        self.lengths = torch.where(active, self.lengths + keys.shape[2], self.lengths)
        before_keys = self.lengths - self.key_tail.counts - keys.shape[2] * active
        before_values = self.lengths - self.value_tail.counts - keys.shape[2] * active
        self.key_tail.push(keys, active)
        self.value_tail.push(values, active)
        for rows, count in _by_size(self.key_tail.counts // residual * residual):
            block = quantize(self.key_tail.oldest(rows, count), self.setting.bits, self.setting.group_size, "tokens")
            _put(self.keys, rows, before_keys[rows], block)
        for rows, count in _by_size((self.value_tail.counts - residual).clamp_min(0)):
            block = quantize(self.value_tail.oldest(rows, count), self.setting.bits, self.values.group_size, "channels")
            _put(self.values, rows, before_values[rows], block)
        self.trim()

    def take_row(self, row: int) -> tuple[Tensor, Tensor]:
        length = int(self.lengths[row])
        exact_keys, exact_values = self.setting.exact(length)
        parts = []
        for stored, tail, exact in (
            (self.keys, self.key_tail, exact_keys),
            (self.values, self.value_tail, exact_values),
        ):
            old = _tokens(stored, 0, length - exact).dequantize(tail.tokens.dtype)[row]
            parts.append(torch.cat([old, tail.tokens[row, :, tail.tokens.shape[2] - exact :]], dim=1))
            tail.counts[row] = 0
            tail.trim()
        self.lengths[row] = 0
        return parts[0], parts[1]

    def copy_rows(self, other: CodecStore, rows: Tensor) -> None:
        assert isinstance(other, KiviStore)
        self.lengths[rows] = other.lengths[rows]
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            _widen(mine, theirs.num_tokens - mine.num_tokens)
            for name in ("codes", "scale", "zero"):
                target, source = getattr(mine, name), getattr(theirs, name)
                target[rows] = 0
                where = _token_dim(mine.along)
                target[rows] = target[rows].slice_scatter(source[rows], where, 0, source.shape[where])
        for mine_tail, their_tail in ((self.key_tail, other.key_tail), (self.value_tail, other.value_tail)):
            width = max(mine_tail.tokens.shape[2], their_tail.tokens.shape[2])
            mine_tail.tokens = _left_pad(mine_tail.tokens, width)
            mine_tail.tokens[rows] = _left_pad(their_tail.tokens, width)[rows]
            mine_tail.counts[rows] = their_tail.counts[rows]

    def trim(self) -> None:
        """Give back the slots that no row fills."""
        self.key_tail.trim()
        self.value_tail.trim()
        for stored, tail in ((self.keys, self.key_tail), (self.values, self.value_tail)):
            _shrink(stored, int((self.lengths - tail.counts).max()))

    # --- reading
    def attend(self, query: Tensor, scale: float) -> tuple[list[Tensor], list[Tensor]]:
        outputs, lses = [], []
        old = self.lengths - self.value_tail.counts  # keys and values both quantised
        for start in range(0, int(old.max()), BLOCK_TOKENS):
            stop = min(start + BLOCK_TOKENS, int(old.max()))
            beyond = torch.arange(start, stop) >= old[:, None]
            keys = _tokens(self.keys, start, stop).dequantize(query.dtype)
            values = _tokens(self.values, start, stop).dequantize(query.dtype)
            output, lse = decode_attention(query, keys, values, scale, bias_of(beyond, query.device))
            outputs.append(output)
            lses.append(lse)
        if self.value_tail.tokens.shape[2]:
            width = self.value_tail.tokens.shape[2]
            before = torch.arange(width) < width - self.value_tail.counts[:, None]
            bias = bias_of(before, query.device)
            output, lse = decode_attention(query, self._tail_keys(), self.value_tail.tokens, scale, bias)
            outputs.append(output)
            lses.append(lse)
        return outputs, lses

    def _tail_keys(self) -> Tensor:
        """Keys [B, H, W, d] of the tokens whose values are exact: the last blocks are quantised, the rest exact."""
        exact, width = self.key_tail.tokens, self.value_tail.tokens.shape[2]
        quantised = self.lengths - self.key_tail.counts
        if int(quantised.max()) == 0:
            return exact
        token = self.lengths[:, None] - width + torch.arange(width)  # [B, W]
        is_exact = token >= quantised[:, None]
        exact_slot = (exact.shape[2] - self.key_tail.counts)[:, None] + token - quantised[:, None]
        first = int(token.masked_fill(is_exact | (token < 0), UNBOUNDED).min())
        if first == UNBOUNDED:
            return exact
        first -= first % self.setting.group_size
        old = _tokens(self.keys, first, int(quantised.max())).dequantize(exact.dtype)
        both = torch.cat([old, exact], dim=2)
        slot = torch.where(is_exact, old.shape[2] + exact_slot, token - first).clamp(0, both.shape[2] - 1)
        index = slot.to(both.device)[:, None, :, None].expand(-1, both.shape[1], -1, both.shape[3])
        return both.gather(2, index)


def _empty(
    batch: int, num_heads: int, dim: int, bits: int, group: int, along: Along, device: torch.device
) -> QuantizedTensor:
    """A quantised tensor of no tokens."""
    size = packed_bytes(group, bits)
    groups = (dim, 0) if along == "tokens" else (0, -(-dim // group))
    codes = torch.zeros(batch, num_heads, *groups, size, dtype=torch.uint8, device=device)
    scale = torch.zeros(batch, num_heads, *groups, dtype=torch.float16, device=device)
    return QuantizedTensor(bits, group, along, 0 if along == "tokens" else dim, codes, scale, scale.clone())


def _token_dim(along: Along) -> int:
    """Dimension of `codes`, `scale` or `zero` [B, H, ...] that counts token groups (or tokens)."""
    return 3 if along == "tokens" else 2


def _widen(stored: QuantizedTensor, extra: int) -> None:
    """Make room for `extra` more tokens (whole groups when quantised along tokens)."""
    if extra <= 0:
        return
    count = extra // stored.group_size if stored.along == "tokens" else extra
    for name in ("codes", "scale", "zero"):
        tensor, dim = getattr(stored, name), _token_dim(stored.along)
        shape = (*tensor.shape[:dim], count, *tensor.shape[dim + 1 :])
        setattr(stored, name, torch.cat([tensor, tensor.new_zeros(shape)], dim=dim))
    if stored.along == "tokens":
        stored.length += extra


def _shrink(stored: QuantizedTensor, tokens: int) -> None:
    """Give back the slots behind the first `tokens` tokens."""
    if stored.num_tokens <= tokens:
        return
    count = tokens // stored.group_size if stored.along == "tokens" else tokens
    for name in ("codes", "scale", "zero"):
        tensor = getattr(stored, name)
        setattr(stored, name, tensor.narrow(_token_dim(stored.along), 0, count).clone())
    if stored.along == "tokens":
        stored.length = tokens


def drop_front(stored: QuantizedTensor, rows: Tensor, count: int) -> None:
    """Move the tokens of `rows` [r] forward over their first `count` ones (whole groups when along tokens)."""
    step = count // stored.group_size if stored.along == "tokens" else count
    if step == 0:
        return
    for name in ("codes", "scale", "zero"):
        tensor = getattr(stored, name)
        tensor[rows] = tensor[rows].roll(-step, dims=_token_dim(stored.along))


def _put(stored: QuantizedTensor, rows: Tensor, starts: Tensor, block: QuantizedTensor) -> None:
    """Write a block of tokens [r, H, t, d] into `rows` [r], from token `starts` [r] on."""
    count = block.num_tokens
    _widen(stored, int(starts.max()) + count - stored.num_tokens)
    step = stored.group_size if stored.along == "tokens" else 1
    slots = (starts // step)[:, None] + torch.arange(count // step)
    for name in ("codes", "scale", "zero"):
        target, source = getattr(stored, name), getattr(block, name)
        if stored.along == "tokens":  # [B, H, d, G, ...] indexed to [r, g, H, d, ...]
            target[rows[:, None], :, :, slots] = source.movedim(3, 1)
        else:
            target[rows[:, None], :, slots] = source.transpose(1, 2)


def _tokens(stored: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """A view of the tokens [start, stop); `start` on a group border."""
    pick: tuple[slice, ...]
    if stored.along == "tokens":
        groups = slice(start // stored.group_size, -(-stop // stored.group_size))
        pick = (slice(None), slice(None), slice(None), groups)
        length = stop - start
    else:
        pick, length = (slice(None), slice(None), slice(start, stop)), stored.length
    return QuantizedTensor(
        stored.bits, stored.group_size, stored.along, length, stored.codes[pick], stored.scale[pick], stored.zero[pick]
    )


def _by_size(counts: Tensor) -> list[tuple[Tensor, int]]:
    """Rows [r] with the same positive count, and that count."""
    return [((counts == size).nonzero().flatten(), size) for size in counts.unique().tolist() if size > 0]


def bias_of(hidden: Tensor, device: torch.device) -> Tensor | None:
    """Additive bias of a mask [B, N] of what to hide; None when nothing is."""
    return hide(hidden[:, None].to(device)) if bool(hidden.any()) else None


def _left_pad(tokens: Tensor, width: int) -> Tensor:
    return torch.cat([tokens.new_zeros(*tokens.shape[:2], width - tokens.shape[2], tokens.shape[3]), tokens], dim=2)

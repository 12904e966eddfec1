"""Quantised tokens of one layer in KVQuant's layout: pre-RoPE keys per channel, values per token, outliers aside.

Legend: B batch rows, H KV heads, n tokens of a row, N stored slots, S exact first tokens, C levels, M outliers,
Q new tokens, P packed bytes of one token and head, Hq query heads, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.baselines.codec import CodecSetting, CodecStore
from kvcore.baselines.kivi_store import bias_of
from kvcore.budget import ModelSpec
from kvcore.kernels import decode_attention
from kvcore.quant import pack, packed_bytes, unpack
from kvcore.rope import shift_positions
from kvcore.state import BatchedState

BLOCK_TOKENS = 1024  # tokens restored at a time
HISTOGRAM_BINS = 1024  # k-means sees the normalised entries through a histogram over [-1, 1]
NO_OUTLIER = -1


@dataclass(frozen=True)
class NuqSetting(CodecSetting):
    """Bits per code, share of entries kept as outliers, first tokens left exact, rounds of k-means."""

    bits: int
    outliers: float
    num_sinks: int
    iterations: int

    def per_token(self, spec: ModelSpec) -> int:
        """Outliers of one token's value, all KV heads together: as many above as below."""
        return 2 * round(self.outliers / 2 * spec.num_kv_heads * spec.head_dim)

    def bytes(self, tokens: int, spec: ModelSpec) -> float:
        heads, dim, itemsize = spec.num_kv_heads, spec.head_dim, spec.dtype.itemsize
        sinks = min(self.num_sinks, tokens)
        rest = tokens - sinks
        codes = 2 * heads * packed_bytes(dim, self.bits) * rest
        ranges = 2 * itemsize * (heads * dim + rest)
        levels = 2 * 2**self.bits * itemsize
        # of the keys' outliers both sides of every channel are rounded up
        of_keys = heads * dim * 2 * (int(self.outliers / 2 * rest) + 1) if self.outliers else 0
        return (
            codes
            + ranges
            + levels
            + (of_keys + self.per_token(spec) * rest) * (4 + itemsize)
            + (2 * sinks * heads * dim * itemsize)
        )

    def fullest(self, tokens: int) -> int:
        return tokens  # side data is spread over ever more tokens

    def make_store(self, spec: ModelSpec, batch: int, like: Tensor) -> NuqStore:
        return NuqStore(self, spec, batch, like)


class Codes(BatchedState):
    """One non-uniformly quantised tensor [B, H, N, d].

    Attributes:
        codes: packed, uint8 [B, H, N, P].
        levels: [B, C], in [-1, 1], ascending.
        center, radius: [B, H, d] of every channel (keys), or [B, N] of every token (values).
        index: int32 [B, M], place (token, head, channel) of each outlier in the flattened N x H x d, or -1.
        outlier: [B, M], its value.
        placed: [B], outliers of each row.
    """

    host_fields = frozenset({"placed"})

    def __init__(self, batch: int, num_heads: int, dim: int, bits: int, like: Tensor) -> None:
        self.bits, self.dim = bits, dim
        size = packed_bytes(dim, bits)
        self.codes = torch.zeros(batch, num_heads, 0, size, dtype=torch.uint8, device=like.device)
        self.levels = like.new_zeros(batch, 2**bits)
        self.center, self.radius = like.new_zeros(batch, 0), like.new_zeros(batch, 0)
        self.index = torch.zeros(batch, 0, dtype=torch.int32, device=like.device)
        self.outlier = like.new_zeros(batch, 0)
        self.placed = torch.zeros(batch, dtype=torch.long)

    def write(self, rows: Tensor, starts: Tensor, normal: Tensor, exact: Tensor, outliers: Tensor) -> None:
        """Store tokens [r, H, t, d] of `rows` [r] from the slots `starts` [r] on.

        Args:
            normal: entries scaled to [-1, 1].
            exact: the entries themselves.
            outliers: bool, entries kept as they are.
        """
        count, size = normal.shape[2], normal.shape[1] * normal.shape[3]
        self.codes = room(self.codes, 2, int(starts.max()) + count)
        borders = ((self.levels[rows, 1:] + self.levels[rows, :-1]).float() / 2).contiguous()
        codes = torch.searchsorted(borders, normal.float().flatten(1)).to(torch.uint8).view(normal.shape)
        slots = starts[:, None] + torch.arange(count)
        self.codes[rows[:, None], :, slots] = pack(codes, self.bits).transpose(1, 2)
        marked = outliers.transpose(1, 2).flatten(1)  # token, head, channel
        which, place = marked.nonzero(as_tuple=True)
        found = marked.sum(1)
        rank = (marked.cumsum(1) - 1)[which, place]
        target = self.placed[rows].to(rank.device)[which] + rank
        self.placed[rows] += found.cpu()
        most = int(self.placed.max())
        self.index, self.outlier = room(self.index, 1, most, NO_OUTLIER), room(self.outlier, 1, most)
        row = rows.to(which.device)[which]
        self.index[row, target] = (place + starts.to(which.device)[which] * size).to(torch.int32)
        self.outlier[row, target] = exact.transpose(1, 2).flatten(1)[which, place]

    def restore(self, start: int, stop: int, per_channel: bool) -> Tensor:
        """Tokens [B, H, t, d] of the slots [start, stop), in the dtype of the levels."""
        batch, heads = self.codes.shape[:2]
        codes = unpack(self.codes[:, :, start:stop], self.bits, self.dim)
        flat = self.levels.gather(1, codes.flatten(1).long())
        normal = flat.view(batch, heads, stop - start, self.dim)
        if per_channel:
            tokens = normal * self.radius.unsqueeze(2) + self.center.unsqueeze(2)
        else:
            radius, center = (t[:, None, start:stop, None] for t in (self.radius, self.center))
            tokens = normal * radius + center
        tokens = tokens.transpose(1, 2).reshape(batch, -1)
        size = heads * self.dim
        place = self.index.long() - start * size
        inside = (place >= 0) & (place < (stop - start) * size) & (self.index != NO_OUTLIER)
        spare = torch.cat([tokens, tokens.new_zeros(batch, 1)], dim=1)  # the last slot takes what lies elsewhere
        spare.scatter_(1, place.where(inside, torch.full_like(place, tokens.shape[1])), self.outlier)
        return spare[:, :-1].view(batch, stop - start, heads, self.dim).transpose(1, 2)

    def copy_rows(self, other: Codes, rows: Tensor) -> None:
        for name, fill in (("codes", 0), ("levels", 0), ("center", 0), ("radius", 0), ("index", -1), ("outlier", 0)):
            mine, theirs = getattr(self, name), getattr(other, name)
            shape = [max(a, b) for a, b in zip(mine.shape, theirs.shape, strict=True)] if mine.numel() else theirs.shape
            joined = grown(mine, shape, fill)
            joined[rows] = grown(theirs, shape, fill)[rows]
            setattr(self, name, joined)
        self.placed[rows] = other.placed[rows]


class NuqStore(CodecStore):
    """Rows that share one setting. The first tokens given to a row calibrate it: channel ranges and levels.

    Attributes:
        lengths: [B] tokens of each row.
        sinks: exact keys and values [B, H, S, d] of the first tokens, post-RoPE.
        sink_counts: [B].
        keys: pre-RoPE; values.
    """

    host_fields = CodecStore.host_fields | {"sink_counts"}

    def __init__(self, setting: NuqSetting, spec: ModelSpec, batch: int, like: Tensor) -> None:
        heads, dim = like.shape[-3], like.shape[-1]
        self.setting, self.spec = setting, spec
        self.lengths, self.sink_counts = torch.zeros(batch, dtype=torch.long), torch.zeros(batch, dtype=torch.long)
        empty = like.new_zeros(batch, heads, 0, dim)
        self.sinks = (empty, empty.clone())
        self.keys = Codes(batch, heads, dim, setting.bits, like)
        self.values = Codes(batch, heads, dim, setting.bits, like)

    # --- writing
    def append(self, keys: Tensor, values: Tensor, active: Tensor) -> None:
        rows = active.nonzero().flatten()
        if bool((self.lengths[rows] == 0).any()):
            assert len(rows) == 1, "rows are calibrated one by one"
            self._calibrate(int(rows[0]), keys[rows[0]], values[rows[0]])
            return
        starts = self.lengths[rows] - self.sink_counts[rows]
        self._write_keys(rows, starts, self._turn(keys[rows], starts + self.sink_counts[rows], back=True))
        self._write_values(rows, starts, values[rows])
        self.lengths = torch.where(active, self.lengths + keys.shape[2], self.lengths)

    def _calibrate(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Prompt of one row [H, n, d]: exact first tokens, channel ranges from the rest, then levels."""
        count = min(self.setting.num_sinks, keys.shape[1] - 1)
        for index, tensor in enumerate((keys, values)):
            sinks = room(self.sinks[index], 2, count)
            sinks[row, :, :count] = tensor[:, :count]
            self.sinks = (sinks, self.sinks[1]) if index == 0 else (self.sinks[0], sinks)
        rows, start = torch.tensor([row]), torch.tensor([0])
        plain = self._turn(keys[None, :, count:], torch.tensor([count]), back=True)
        rest = values[None, :, count:]
        low, high = channel_range(plain[0].float(), self.setting.outliers)
        self.keys.center, self.keys.radius = (
            _placed(old, row, new.to(keys.dtype))
            for old, new in ((self.keys.center, (high + low) / 2), (self.keys.radius, (high - low) / 2))
        )
        normal, outliers = self._normal_keys(rows, plain)
        weight = self.keys.radius[row].float().square().unsqueeze(1).expand(normal.shape[1:])
        self.keys.levels[row] = self._levels(normal, outliers, weight)
        normal, outliers, _, radius = self._normal_values(rest)
        weight = radius.float().square()[0, None, :, None].expand(normal.shape[1:])
        self.values.levels[row] = self._levels(normal, outliers, weight)
        self.lengths[row], self.sink_counts[row] = keys.shape[1], count
        self._write_keys(rows, start, plain, limited=False)
        self._write_values(rows, start, rest)

    def _levels(self, normal: Tensor, outliers: Tensor, weight: Tensor) -> Tensor:
        levels = nuq_levels(normal[0][~outliers[0]], weight[~outliers[0]], self.setting.bits, self.setting.iterations)
        return levels.to(self.keys.levels.dtype)

    def _write_keys(self, rows: Tensor, starts: Tensor, plain: Tensor, limited: bool = True) -> None:
        """Pre-RoPE keys [r, H, t, d]; of later tokens at most as many outliers as a value has, the largest."""
        normal, outliers = self._normal_keys(rows, plain)
        if limited:
            allowed = self.setting.per_token(self.spec)
            size = normal.abs().transpose(1, 2).flatten(2)  # [r, t, H d]
            top = torch.zeros_like(size, dtype=torch.bool)
            if allowed:
                top.scatter_(2, size.topk(allowed, dim=2).indices, True)
            outliers = outliers & top.view(len(rows), plain.shape[2], *plain.shape[1::2]).transpose(1, 2)
        self.keys.write(rows, starts, normal.clamp(-1, 1), plain, outliers)

    def _normal_keys(self, rows: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
        """Keys in units of their channel's range, and which lie outside it."""
        center, radius = (t[rows].float().unsqueeze(2) for t in (self.keys.center, self.keys.radius))
        normal = (plain.float() - center) / radius.clamp_min(1e-8)
        outside = normal.abs() > 1 + 1e-2 if self.setting.outliers == 0 else normal.abs() > 1
        return normal, outside

    def _normal_values(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values [r, H, t, d] in units of their token's range without outliers; outliers; center and radius [r, t]."""
        allowed = self.setting.per_token(self.spec) // 2
        flat = values.float().transpose(1, 2).flatten(2)  # [r, t, H d]
        marked = torch.zeros_like(flat, dtype=torch.bool)
        if allowed:
            marked.scatter_(2, flat.topk(allowed, dim=2).indices, True)
            marked.scatter_(2, flat.topk(allowed, dim=2, largest=False).indices, True)
        high = flat.masked_fill(marked, float("-inf")).amax(2)
        low = flat.masked_fill(marked, float("inf")).amin(2)
        center, radius = ((high + low) / 2).to(values.dtype), ((high - low) / 2).to(values.dtype)
        normal = (flat - center.float().unsqueeze(2)) / radius.float().clamp_min(1e-8).unsqueeze(2)
        shape = (values.shape[0], values.shape[2], *values.shape[1::2])
        return normal.view(shape).transpose(1, 2), marked.view(shape).transpose(1, 2), center, radius

    def _write_values(self, rows: Tensor, starts: Tensor, values: Tensor) -> None:
        normal, outliers, center, radius = self._normal_values(values)
        count = values.shape[2]
        slots = starts[:, None] + torch.arange(count)
        for name, new in (("center", center), ("radius", radius)):
            stored = room(getattr(self.values, name), 1, int(starts.max()) + count)
            stored[rows[:, None], slots] = new
            setattr(self.values, name, stored)
        self.values.write(rows, starts, normal.clamp(-1, 1), values, outliers)

    # --- reading
    def attend(self, query: Tensor, scale: float) -> tuple[list[Tensor], list[Tensor]]:
        states = []
        held = self.lengths - self.sink_counts
        if self.sinks[0].shape[2]:
            beyond = torch.arange(self.sinks[0].shape[2]) >= self.sink_counts[:, None]
            states.append(decode_attention(query, *self.sinks, scale, bias_of(beyond, query.device)))
        for start in range(0, int(held.max()), BLOCK_TOKENS):
            stop = min(start + BLOCK_TOKENS, int(held.max()))
            keys, values = self._block(start, stop)
            beyond = torch.arange(start, stop) >= held[:, None]
            states.append(decode_attention(query, keys, values, scale, bias_of(beyond, query.device)))
        return [output for output, _ in states], [lse for _, lse in states]

    def _block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Post-RoPE keys and values [B, H, t, d] of the slots [start, stop)."""
        plain = self.keys.restore(start, stop, per_channel=True)
        keys = self._turn(plain, start + self.sink_counts, back=False)
        return keys, self.values.restore(start, stop, per_channel=False)

    def _turn(self, keys: Tensor, first: Tensor, back: bool) -> Tensor:
        """Take RoPE off (`back`) or put it on keys [B, H, t, d] whose first token stands at `first` [B]."""
        if self.spec.inverse_frequencies is None:
            return keys
        position = first[:, None, None] + torch.arange(keys.shape[2])
        return shift_positions(keys, -position if back else position, self.spec.inverse_frequencies)

    # --- moving rows
    def take_row(self, row: int) -> tuple[Tensor, Tensor]:
        count, held = int(self.sink_counts[row]), int(self.lengths[row] - self.sink_counts[row])
        blocks = self._block(0, held)
        parts = [torch.cat([sink[row, :, :count], b[row]], dim=1) for sink, b in zip(self.sinks, blocks, strict=True)]
        self.lengths[row] = self.sink_counts[row] = 0
        for codes in (self.keys, self.values):
            codes.index[row], codes.placed[row] = NO_OUTLIER, 0
        return parts[0], parts[1]

    def copy_rows(self, other: CodecStore, rows: Tensor) -> None:
        assert isinstance(other, NuqStore)
        self.lengths[rows], self.sink_counts[rows] = other.lengths[rows], other.sink_counts[rows]
        width = max(self.sinks[0].shape[2], other.sinks[0].shape[2])
        mine, theirs = ([room(t, 2, width) for t in store.sinks] for store in (self, other))
        for target, source in zip(mine, theirs, strict=True):
            target[rows] = source[rows]
        self.sinks = (mine[0], mine[1])
        self.keys.copy_rows(other.keys, rows)
        self.values.copy_rows(other.values, rows)


def channel_range(keys: Tensor, outliers: float) -> tuple[Tensor, Tensor]:
    """Lowest and highest entry [H, d] of each channel of [H, n, d], half of the `outliers` share cut at each end."""
    ordered = keys.sort(dim=1).values
    place = outliers / 2 * (keys.shape[1] - 1)
    lower = int(place)
    upper, part = min(lower + 1, keys.shape[1] - 1), place - lower
    low = ordered[:, lower] + part * (ordered[:, upper] - ordered[:, lower])
    high = ordered[:, -1 - lower] + part * (ordered[:, -1 - upper] - ordered[:, -1 - lower])
    return low, high


def nuq_levels(normal: Tensor, weight: Tensor, bits: int, iterations: int) -> Tensor:
    """Levels [2 ** bits], ascending: weighted k-means of entries in [-1, 1] (section 3.3), through a histogram.

    Deterministic: levels start at the weighted quantiles; a level without entries stays where it is.
    """
    count = 2**bits
    bins = ((normal.clamp(-1, 1) + 1) / 2 * HISTOGRAM_BINS).long().clamp(0, HISTOGRAM_BINS - 1)
    mass = torch.bincount(bins, weights=weight.double(), minlength=HISTOGRAM_BINS)
    middle = (torch.arange(HISTOGRAM_BINS, device=mass.device, dtype=mass.dtype) + 0.5) / HISTOGRAM_BINS * 2 - 1
    if not bool(mass.sum() > 0):
        return torch.linspace(-1, 1, count, device=mass.device)
    share = (torch.arange(count, device=mass.device, dtype=mass.dtype) + 0.5) / count
    quantile = torch.searchsorted(mass.cumsum(0) / mass.sum(), share).clamp_max(HISTOGRAM_BINS - 1)
    levels = middle[quantile]
    for _ in range(iterations):
        nearest = torch.searchsorted((levels[1:] + levels[:-1]) / 2, middle)
        total = torch.zeros_like(levels).index_add_(0, nearest, mass)
        moment = torch.zeros_like(levels).index_add_(0, nearest, mass * middle)
        levels = torch.where(total > 0, moment / total.clamp_min(1e-300), levels).sort().values
    return levels.float()


def room(tensor: Tensor, dim: int, size: int, fill: float = 0) -> Tensor:
    """The tensor with at least `size` entries along `dim`."""
    extra = size - tensor.shape[dim]
    if extra <= 0:
        return tensor
    shape = (*tensor.shape[:dim], extra, *tensor.shape[dim + 1 :])
    return torch.cat([tensor, tensor.new_full(shape, fill)], dim=dim)


def grown(tensor: Tensor, shape: list[int] | torch.Size, fill: float) -> Tensor:
    """The tensor padded to `shape`."""
    out = tensor.new_full(tuple(shape), fill)
    if tensor.numel():
        out[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return out


def _placed(old: Tensor, row: int, new: Tensor) -> Tensor:
    """[B, H, d] with `new` [H, d] in one row; `old` may still be empty."""
    out = grown(old, [old.shape[0], *new.shape], 0) if old.dim() != new.dim() + 1 else old.clone()
    out[row] = new
    return out

"""What a budget means, and the ledger that measures whether a cache kept to it.

Full cache = `2 * L * Hkv * d * itemsize * tokens` bytes for the same tokens in the model's dtype
(L layers, Hkv KV heads, d head dimension). A budget is the share of it that may be resident on the device
at the worst moment of the decode, everything counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Scope = Literal["bytes", "layer"]
SCOPES: tuple[Scope, ...] = ("bytes", "layer")


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a model's KV cache.

    Attributes:
        num_layers: L, decoder layers.
        num_heads: Hq, query heads.
        num_kv_heads: Hkv, key/value heads.
        head_dim: d.
        dtype: dtype of keys and values.
        device: device of the first layer's keys and values.
        max_positions: longest sequence the model was built for, in tokens.
        sliding_windows: per layer, the attention window in tokens, or None for full attention.
        inverse_frequencies: RoPE inverse frequencies [d_rot / 2] (fp32), or None.
        backbone_id: name or path of the checkpoint, for messages and checkpoint checks.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    max_positions: int
    sliding_windows: tuple[int | None, ...]
    inverse_frequencies: torch.Tensor | None = field(default=None, compare=False, repr=False)
    backbone_id: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSpec:
        return self

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's key and value in one layer and KV head."""
        return 2 * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the full cache, over all layers and KV heads."""
        return self.num_layers * self.num_kv_heads * self.entry_bytes

    def full_bytes(self, tokens: int) -> int:
        """Bytes of the full cache of `tokens` tokens."""
        return self.token_bytes * tokens


@dataclass(frozen=True)
class Budget:
    """A budget: a share of the full cache (float) or a number of tokens per layer and KV head (int).

    Attributes:
        value: float in (0, 1], or int >= 2.
        scope: `bytes` (device bytes, the default) or `layer` (entries of every layer and KV head:
            persistent and expanded together within the share).
    """

    value: float | int
    scope: Scope = "bytes"

    def __post_init__(self) -> None:
        rule = "a budget is a share of the full cache (0 < budget <= 1.0) or an integer number of tokens >= 2"
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{rule}; received {value!r}. Example: budget=0.1")
        if isinstance(value, int):
            if value == 1:
                raise ValueError(f"{rule}; received the integer 1, which is ambiguous: write 1.0 for the full cache")
            if value < 1:
                raise ValueError(f"{rule}; received {value!r}. Example: budget=1024")
        elif not 0.0 < value <= 1.0:
            raise ValueError(f"{rule}; received {value!r}. Example: budget=0.1 keeps a tenth of the bytes")
        if self.scope not in SCOPES:
            raise ValueError(f"budget_scope must be one of {', '.join(SCOPES)}; received {self.scope!r}")

    def share(self, tokens: int) -> float:
        """The budget as a share of the full cache of `tokens` tokens, at most 1."""
        if isinstance(self.value, int):
            return min(1.0, self.value / max(tokens, 1))
        return float(self.value)

    @property
    def is_full(self) -> bool:
        """Whether the budget is the whole cache at every length."""
        return isinstance(self.value, float) and self.value >= 1.0

    def entries(self, tokens: int, entry_bytes: int | None = None, spec: ModelSpec | None = None) -> int:
        """Entries per layer and KV head within the budget of `tokens` tokens; at least 1, at most `tokens`.

        Args:
            tokens: tokens of the full cache.
            entry_bytes: bytes that the method spends on one entry, side data included; None means a plain entry.
            spec: the model, needed with `entry_bytes`.
        """
        allowed = self.share(tokens) * tokens
        if self.is_full:
            return max(tokens, 1)
        if entry_bytes is not None and spec is not None and self.scope == "bytes":
            allowed *= spec.entry_bytes / entry_bytes
        # 1e-9: a share such as 0.1 * 4090 must not lose an entry to floating point
        return max(1, min(tokens, math.floor(allowed + 1e-9)))

    def device_bytes(self, spec: ModelSpec, tokens: int) -> int:
        """Bytes allowed on the device for `tokens` tokens."""
        return math.floor(self.share(tokens) * spec.full_bytes(tokens) + 1e-6)


@dataclass
class Ledger:
    """Measured memory and traffic of one cache, over its whole decode.

    Attributes:
        device_bytes: largest device bytes seen.
        host_bytes: largest host bytes seen.
        device_share: largest ratio of device bytes to the full cache of the same moment.
        prefill_device_bytes: device bytes at the peak of the prefill (staged keys and values included).
        attended_share: mean attended entries per head and step, as a share of the tokens so far.
        h2d_bytes: host-to-device bytes moved while decoding.
        h2d_stall_seconds: how long decode steps waited for them, as far as the device has come.
        decode_tokens: tokens decoded.
        rows: batch rows.
    """

    device_bytes: int = 0
    host_bytes: int = 0
    device_share: float = 0.0
    prefill_device_bytes: int = 0
    h2d_bytes: int = 0
    h2d_stall_seconds: float = 0.0
    decode_tokens: int = 0
    rows: int = 1
    _attended_sum: float = 0.0
    _attended_count: int = 0

    def record_memory(self, device_bytes: int, host_bytes: int, full_bytes: int) -> None:
        """One moment of the decode: bytes held now, and those of the full cache of the same tokens."""
        self.device_bytes = max(self.device_bytes, device_bytes)
        self.host_bytes = max(self.host_bytes, host_bytes)
        self.device_share = max(self.device_share, device_bytes / max(full_bytes, 1))

    def record_attended(self, share: float) -> None:
        """One step of one layer: mean attended entries per head as a share of the tokens so far."""
        self._attended_sum += share
        self._attended_count += 1

    @property
    def attended_share(self) -> float:
        return self._attended_sum / self._attended_count if self._attended_count else 1.0

    @property
    def h2d_bytes_per_token(self) -> float:
        """Host-to-device bytes per decoded token and batch row."""
        return self.h2d_bytes / max(self.decode_tokens * self.rows, 1)

    @property
    def h2d_stall_ms_per_token(self) -> float:
        """Milliseconds that steps waited for host rows, per decoded token and batch row."""
        return 1000 * self.h2d_stall_seconds / max(self.decode_tokens * self.rows, 1)

    def as_row(self) -> dict[str, float | int]:
        """The columns of a result row."""
        return {
            "device_share": self.device_share,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "attended_share": self.attended_share,
            "h2d_bytes_per_token": self.h2d_bytes_per_token,
            "h2d_stall_ms_per_token": self.h2d_stall_ms_per_token,
            "prefill_device_bytes": self.prefill_device_bytes,
        }


class UnreachableBudgetError(ValueError):
    """A budget that a method cannot meet; the message names the smallest reachable one and the levers."""

    def __init__(self, method: str, budget: float | int, smallest: float, levers: str) -> None:
        self.smallest = smallest
        super().__init__(
            f"method '{method}' cannot meet budget={budget}: the smallest it can reach here is {smallest:.4g}. "
            f"Levers: {levers}"
        )

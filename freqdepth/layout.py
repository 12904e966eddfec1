"""What a block of layers stores of one batch row, and attention over it.

A row's tokens are: sinks, then the middle (shared coefficients, exact heads), then an exact window. The middle's order
is its own: residual tokens stand first, so that no index is looked up while decoding; attention does not care.

Legend: J layers of the block, H KV heads, G query heads per KV head, Q new tokens, P = G * Q rows per KV head,
S streams, Hs heads per stream, M middle tokens, W sink and window tokens, r residual tokens, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from freqdepth.residual import ResidualStore
from freqdepth.shared import SharedSide
from freqdepth.window import FLOAT8, restored, rounded, window_scale
from kvcore.kernels import causal_bias
from kvcore.rope import shift_positions
from kvcore.state import BatchedState


@dataclass
class BlockReport:
    """What the probe decided for one block of one row, and what it costs.

    Attributes:
        modes: per KV head `shared`, `residual` or `exact`.
        loss: per KV head, eq. 2's data term in the chosen mode, in the probe's unit.
        price: λ, loss per byte (0 when the allowance did not bind).
        key_energy, value_energy: cumulative share of the energy in the leading coefficients (stream 0).
        key_widths, value_widths: (bits, coefficients) stored.
        allowed_bytes: the block's share of the budget.
        folded_tokens, fold_error: decode tokens folded in, and the sum of their relative squared errors.
        dropped_tokens: folded tokens given up because a token budget was spent.
    """

    modes: list[str]
    loss: list[float] = field(default_factory=list)
    price: float = 0.0
    key_energy: list[float] = field(default_factory=list)
    value_energy: list[float] = field(default_factory=list)
    key_widths: list[tuple[int, int]] = field(default_factory=list)
    value_widths: list[tuple[int, int]] = field(default_factory=list)
    allowed_bytes: int = 0
    folded_tokens: int = 0
    fold_error: float = 0.0
    dropped_tokens: int = 0


@dataclass
class WindowPolicy:
    """How many tokens a row keeps apart, and how.

    Attributes:
        dtype: that they are stored in.
        num_sinks: first tokens, kept for good.
        window: newest tokens, never folded.
        fold: tokens folded at a time: the window holds `window` to `window + fold - 1` tokens after a step.
        limit: with nothing to fold into (a very short prompt), the most tokens kept; None otherwise.
    """

    dtype: torch.dtype
    num_sinks: int
    window: int
    fold: int
    limit: int | None = None


class RowBlock(BatchedState):
    """One block of layers of one batch row. Tensors carry no batch dimension: the rows of a cache are its list.

    Attributes:
        shared_heads, exact_heads: KV heads by form; together all of them.
        keys, values: the shared form; None when no head has it, or when shared heads drop the middle (basis=none).
        exact_keys, exact_values: per layer [Hex, M, d].
        residual_keys, residual_values: corrections, or None.
        window_keys, window_values: per layer [H, W, d], sinks first, in the model's dtype or as 8-bit floats.
        key_scale, value_scale: per layer [H, 1, 1], what 8-bit floats are multiplied by, or None.
        positions: int32 [S or 1, M] of the middle tokens when keys are stored before RoPE, else None.
        hidden: places in the middle [H, n], oldest first, of the prompt's tokens that are still in the window.
    """

    def __init__(self, window_keys: list[Tensor], window_values: list[Tensor], policy: WindowPolicy) -> None:
        """`window_keys`, `window_values`: per layer [H, W, d], any dtype; they are stored in the policy's."""
        self.policy = policy
        self.key_scale, self.value_scale = (
            [window_scale(x) if policy.dtype == FLOAT8 else None for x in side] for side in (window_keys, window_values)
        )
        self.window_keys = self._rounded(window_keys, self.key_scale)
        self.window_values = self._rounded(window_values, self.value_scale)
        self.shared_heads: list[int] = []
        self.exact_heads: list[int] = []
        self.keys: SharedSide | None = None
        self.values: SharedSide | None = None
        self.exact_keys: list[Tensor] = []
        self.exact_values: list[Tensor] = []
        self.residual_keys: ResidualStore | None = None
        self.residual_values: ResidualStore | None = None
        self.positions: Tensor | None = None
        self.hidden: Tensor | None = None
        self.frequencies: Tensor | None = None  # the model's, one tensor for all rows
        self.next_position = 0
        self.joint = False
        self.report = BlockReport([])

    def _rounded(self, window: list[Tensor], scales: list[Tensor | None]) -> list[Tensor]:
        return [rounded(x, self.policy.dtype, scale) for x, scale in zip(window, scales, strict=True)]

    @property
    def num_middle(self) -> int:
        """M."""
        if self.exact_keys:
            return self.exact_keys[0].shape[1]
        return self.keys.coefficients.num_tokens if self.keys is not None else 0

    def attended(self, layer: int) -> int:
        """Entries each head of a layer attends to; layers of a block get a step's tokens one after the other."""
        return self.num_middle - self.num_hidden + self.window_keys[layer].shape[1]

    @property
    def num_hidden(self) -> int:
        return 0 if self.hidden is None else self.hidden.shape[1]

    # --- attention
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of new tokens over the row, then store them in the window.

        Args:
            layer: index inside the block.
            query: [Hq, Q, d].
            key, value: [H, Q, d].
            scale: factor on the logits.

        Returns:
            [Hq, Q, d].
        """
        num_heads, num_queries = key.shape[0], key.shape[1]
        key_scale, value_scale = self.key_scale[layer], self.value_scale[layer]
        # in fp32: a CPU takes three times as long for a few rows in half precision
        near_keys = restored(self.window_keys[layer], torch.float32, key_scale)
        near_values = restored(self.window_values[layer], torch.float32, value_scale)
        near_keys, near_values = torch.cat([near_keys, key.float()], 1), torch.cat([near_values, value.float()], 1)
        rows = (query * scale).unflatten(0, (num_heads, -1)).flatten(1, 2).float()  # [H, G * Q, d]
        logits = torch.matmul(rows, near_keys.mT)
        near = logits.shape[-1]
        bias = causal_bias(num_queries, key.device)
        if bias is not None:
            logits[..., -num_queries:] += bias.repeat(rows.shape[1] // num_queries, 1)
        if self.num_middle:
            logits = torch.cat([self._middle_logits(layer, rows), logits], dim=-1)
        weights = torch.softmax(logits, dim=-1)
        output = torch.matmul(weights[..., -near:], near_values)
        if self.num_middle:
            output += self._middle_output(layer, weights[..., :-near])
        new_key, new_value = rounded(key, self.policy.dtype, key_scale), rounded(value, self.policy.dtype, value_scale)
        self.window_keys[layer] = torch.cat([self.window_keys[layer], new_key], dim=1)
        self.window_values[layer] = torch.cat([self.window_values[layer], new_value], dim=1)
        return output.to(value.dtype).unflatten(1, (-1, num_queries)).flatten(0, 1)

    def _streams(self, x: Tensor) -> Tensor:
        """Shared heads of [H, P, n] as [S, Hs, P, n]."""
        mine = x if len(self.shared_heads) == x.shape[0] else x[self.shared_heads]
        return mine.unsqueeze(0) if self.joint else mine.unsqueeze(1)

    def _middle_logits(self, layer: int, rows: Tensor) -> Tensor:
        """fp32 logits [H, P, M] of fp32 rows over the middle."""
        if self.keys is None:
            far = rows.new_full((*rows.shape[:2], self.num_middle), float("-inf"))
        else:
            streams = self._streams(rows)
            if self.positions is None:
                shared = self.keys.logits(streams, layer, self.residual_keys)
            else:
                assert self.frequencies is not None
                shared = self.keys.rotated_logits(streams, layer, self.positions, self.frequencies, self.residual_keys)
            far = shared.flatten(0, 1)
            if self.exact_heads:
                far = rows.new_empty(*rows.shape[:2], self.num_middle)
                far[self.shared_heads] = shared.flatten(0, 1)
        if self.exact_heads:
            keys = self.exact_keys[layer]
            far[self.exact_heads] = torch.matmul(rows[self.exact_heads].to(keys.dtype), keys.mT).float()
        if self.hidden is not None:
            far.scatter_(-1, self.hidden.unsqueeze(1).expand(-1, rows.shape[1], -1), float("-inf"))
        return far

    def _middle_output(self, layer: int, weights: Tensor) -> Tensor:
        """The middle's part of the output [H, P, d] for fp32 attention weights [H, P, M]."""
        if self.values is not None and not self.exact_heads:
            return self.values.output(self._streams(weights), layer, self.residual_values).flatten(0, 1)
        output = weights.new_zeros(*weights.shape[:2], self.window_values[layer].shape[-1])
        if self.values is not None:
            shared = self.values.output(self._streams(weights), layer, self.residual_values)
            output[self.shared_heads] = shared.flatten(0, 1)
        if self.exact_heads:
            values = self.exact_values[layer]
            output[self.exact_heads] = torch.matmul(weights[self.exact_heads].to(values.dtype), values).float()
        return output

    # --- decode tokens leave the window
    def fold(self) -> None:
        """Move the oldest window tokens into the middle, `fold` at a time, until the window is within its bounds."""
        policy = self.policy
        if policy.limit is not None:
            self._trim(policy.limit)
            return
        tiles = (self.window_keys[0].shape[1] - policy.num_sinks - policy.window) // policy.fold
        if tiles > 0:  # a long step's tokens are projected together
            first, last = policy.num_sinks, policy.num_sinks + tiles * policy.fold
            new = first + self._show(last - first)
            if new < last:
                self._append(
                    self._window_tokens(self.window_keys, self.key_scale, new, last),
                    self._window_tokens(self.window_values, self.value_scale, new, last),
                )
            for window in (self.window_keys, self.window_values):
                for layer, tensor in enumerate(window):
                    window[layer] = torch.cat([tensor[:, :first], tensor[:, last:]], dim=1)

    def _show(self, most: int) -> int:
        """Let the oldest hidden tokens, `most` at most, be read in their compressed form; returns how many."""
        count = min(most, self.num_hidden)
        if self.hidden is not None:
            self.hidden = self.hidden[:, count:].clone() if count < self.num_hidden else None
        return count

    def _window_tokens(self, window: list[Tensor], scales: list[Tensor | None], first: int, last: int) -> Tensor:
        """Tokens of all layers [J, H, F, d], in fp32 where they are stored as 8-bit floats."""
        dtype = torch.float32 if self.policy.dtype == FLOAT8 else self.policy.dtype
        parts = zip(window, scales, strict=True)
        return torch.stack([restored(x[:, first:last], dtype, scale) for x, scale in parts])

    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Fold tokens [J, H, F, d] into the middle."""
        exact_keys = keys
        if self.positions is not None:
            assert self.frequencies is not None
            count = keys.shape[2]
            new = torch.arange(self.next_position, self.next_position + count, dtype=torch.int32, device=keys.device)
            keys = shift_positions(keys, -new, self.frequencies)
            self.positions = torch.cat([self.positions, new.expand(self.positions.shape[0], -1)], dim=1)
        self.next_position += keys.shape[2]
        for layer in range(len(self.exact_keys)):
            self.exact_keys[layer] = torch.cat(
                [self.exact_keys[layer], exact_keys[layer, self.exact_heads].to(self.exact_keys[layer].dtype)], dim=1
            )
            self.exact_values[layer] = torch.cat(
                [self.exact_values[layer], values[layer, self.exact_heads].to(self.exact_values[layer].dtype)], dim=1
            )
        if self.keys is not None and self.values is not None:
            dim = 1 if self.joint else 2
            errors = [
                side.fold(x[:, self.shared_heads].unsqueeze(dim), self.policy.fold)
                for side, x in ((self.keys, keys), (self.values, values))
            ]
            self.report.fold_error += float(sum(errors) / 2) * keys.shape[2]
        self.report.folded_tokens += keys.shape[2]

    def _trim(self, limit: int) -> None:
        """Very short prompts: keep sinks and the newest tokens, `limit` in all."""
        for window in (self.window_keys, self.window_values):
            for layer, tensor in enumerate(window):
                excess = tensor.shape[1] - limit
                if excess > 0:
                    sinks = min(self.policy.num_sinks, limit // 2)
                    window[layer] = torch.cat([tensor[:, :sinks], tensor[:, sinks + excess :]], dim=1)

    def drop_oldest_fold(self) -> bool:
        """Give up the oldest folded tile; False when there is none."""
        sides = [side for side in (self.keys, self.values) if side is not None]
        if not sides or self.exact_heads or not sides[0].coefficients.tail_tokens:
            return False
        for side in sides:
            side.coefficients.drop_oldest_tile()
        if self.positions is not None:
            first = sides[0].coefficients.main_tokens
            self.positions = torch.cat(
                [self.positions[:, :first], self.positions[:, first + self.policy.fold :]], dim=1
            )
        self.report.dropped_tokens += self.policy.fold
        return True

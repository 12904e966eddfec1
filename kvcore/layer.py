"""What one layer of a cache stores and how it attends: the class that every method subclasses.

Legend: B batch rows, Hq query heads, Hkv KV heads, T prompt tokens (padding included), Q tokens of this forward,
d head dimension. Keys are post-RoPE everywhere.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcore.budget import Budget, ModelSpec
from kvcore.state import BatchedState
from kvcore.transfer import HostLink


@dataclass
class LayerPrompt:
    """What one layer saw of the prompt.

    Attributes:
        keys, values: [B, Hkv, T, d].
        padding: left-padding tokens of each row.
        scale: the layer's factor on attention logits.
    """

    keys: Tensor
    values: Tensor
    padding: list[int]
    scale: float

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, n, d] of one row, without its padding."""
        first = self.padding[index]
        return self.keys[index, :, first:], self.values[index, :, first:]


class CacheLayer(BatchedState, CacheLayerMixin):
    """What a method stores of one layer. Tensors put in attributes must carry the batch on dimension 0.

    Attributes:
        spec, budget: of the cache that owns the layer.
        layer_idx: index of the decoder layer.
        attended: set by `attend`: mean attended entries per row and KV head in the latest step (float or 0-d tensor).
        fetched_bytes: set by `attend` of methods that keep tokens on the host: bytes moved to the device in the
            latest step, over all rows and KV heads.
        link: how they were moved; None when nothing is.
    """

    is_croppable = False

    def __init__(self, spec: ModelSpec, budget: Budget, layer_idx: int) -> None:
        super().__init__()
        self.spec, self.budget, self.layer_idx = spec, budget, layer_idx
        self.attended: float | Tensor = 0.0
        self.fetched_bytes = 0
        self.link: HostLink | None = None
        self._length = 0

    def observe(self, query: Tensor, keys: Tensor, padding: list[int], scale: float) -> None:
        """See one prefill chunk; the default ignores it.

        Args:
            query: [B, Hq, Q, d] of this chunk.
            keys: [B, Hkv, N, d] of the prompt so far, this chunk included (N >= Q).
            padding: left-padding tokens of each row.
            scale: factor on attention logits.
        """

    @abstractmethod
    def build(self, prompt: LayerPrompt) -> None:
        """Compress the whole prompt of this layer."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tokens: int) -> Tensor:
        """Attention of Q new tokens over the stored prompt and themselves (causally), then store them.

        Args:
            query: [B, Hq, Q, d].
            key, value: [B, Hkv, Q, d] of the same tokens.
            scale: factor on attention logits.
            tokens: tokens so far, the new ones included (padding not deducted).

        Returns:
            [B, Hq, Q, d].
        """

    def attended_lse(self, query: Tensor, scale: float) -> Tensor | None:
        """Log-sum-exp of a query's logits over the prompt tokens that the latest step attended to one by one.

        For coverage measurements only; called after `attend` with its last query [B, Hq, 1, d].

        Returns:
            [B, Hq, 1], natural log; None when the layer cannot say.
        """
        return None

    # --- the part of the transformers interface that works per layer
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Nothing is stored here: the attention function hands keys and values to `CompressedCache.attend`."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens exactly; layers that can say so in `is_croppable`."""
        raise NotImplementedError(f"{type(self).__name__} cannot take tokens back")

"""One prefill for many caches: every method sees the same forward, so a comparison costs one prefill per prompt.

Full attention during the prefill does not depend on what a cache keeps, so the forward is computed once and each
child observes and compresses it. Decoding is done by each child alone.
"""

from __future__ import annotations

import time

from torch import Tensor
from transformers import PreTrainedModel

from kvcore.budget import Budget
from kvcore.cache import CompressedCache
from kvcore.kernels import prefill_attention


class FanOutCache(CompressedCache):
    """Hands one prefill to several empty caches of the same model.

    Args:
        children: empty caches; afterwards each is ready to decode.

    Attributes:
        seconds: compression time of each child during the prefill (the shared forward is not included).
    """

    def __init__(self, children: list[CompressedCache]) -> None:
        if not children:
            raise ValueError("a shared prefill needs at least one cache; received none")
        self.children = children
        self.seconds = [0.0] * len(children)
        super().__init__(children[0].spec, Budget(1.0), list, "shared prefill")

    def begin_forward(self, batch: int, num_tokens: int, attention_mask: Tensor | None) -> None:
        super().begin_forward(batch, num_tokens, attention_mask)
        for child in self.children:
            child.prefill_tokens = self.prefill_tokens
            child.begin_forward(batch, num_tokens, attention_mask)

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        self._attend_calls += 1
        keys, values = self._stage(layer_idx, key, value)
        output = prefill_attention(query, keys, values, scale, self._padding, window)
        for index, child in enumerate(self.children):
            began = time.perf_counter()
            child._staged[layer_idx] = self._staged[layer_idx]
            child._attend_calls += 1
            child._update_calls += 1
            child.take_prefill(layer_idx, query, keys, scale)
            self.seconds[index] += time.perf_counter() - began
        if self._last_chunk:
            del self._staged[layer_idx]
        return output

    def fail_forward(self) -> None:
        super().fail_forward()
        for child in self.children:
            child.fail_forward()

    def end_forward(self, model: PreTrainedModel, input_ids: Tensor | None, hidden: Tensor) -> None:
        self._tokens += self._forward_tokens
        for index, child in enumerate(self.children):
            began = time.perf_counter()
            child.end_forward(model, input_ids, hidden)
            self.seconds[index] += time.perf_counter() - began

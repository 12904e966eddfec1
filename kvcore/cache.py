"""CompressedCache: the transformers `Cache` that every method subclasses or fills with its own layers.

Life of a cache: empty -> prefill (one forward, or chunks) -> compress -> decode steps of one or more tokens.
The attention function (`kvcore.attention`) hands every layer's queries, keys and values to `attend`; the cache
computes the attention itself, so a method is free to store whatever it likes.

Legend: B batch rows, Hq query heads, Hkv KV heads, T prompt tokens (padding included), Q tokens of this forward,
d head dimension. Keys are post-RoPE everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvcore.budget import Budget, Ledger, ModelSpec
from kvcore.kernels import prefill_attention
from kvcore.layer import CacheLayer, LayerPrompt
from kvcore.state import BatchedState, storage_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Phase(Enum):
    """Where a cache is in its life."""

    EMPTY = "empty"
    PREFILL = "prefill"
    DECODE = "decode"


class CompressedCache(Cache):
    """A KV cache that drops into `model.generate(..., past_key_values=cache)`.

    Build it with `Method.new_cache(model, budget)`, which attaches the model to the shared attention function.

    Args:
        spec: the model's shape.
        budget: the byte budget.
        make_layers: gives one empty `CacheLayer` per decoder layer; called now and at every `reset`.
        method: the method's registered name, for messages and results.
        prefill_tokens: when the prompt arrives in several forwards (chunked prefill by `generate`), the tokens of
            the whole prompt, padding included; None means that the first forward is the whole prompt.
    """

    layers: list[CacheLayer]  # type: ignore[assignment]

    def __init__(
        self,
        spec: ModelSpec,
        budget: Budget,
        make_layers: Callable[[], list[CacheLayer]],
        method: str,
        prefill_tokens: int | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.spec, self.budget, self.method = spec, budget, method
        self.make_layers = make_layers
        self.attend_observer: Callable[[CacheLayer, Tensor, float], None] | None = None
        self.prefill_tokens = prefill_tokens
        self.reset()

    def reset(self) -> None:
        """Back to the empty cache: every stored tensor dropped, length 0, a fresh ledger."""
        self.layers = self.make_layers()
        self.phase = Phase.EMPTY
        self.ledger = Ledger()
        self._tokens = 0
        self._padding: list[int] = []
        self._staged: dict[int, tuple[Tensor, Tensor]] = {}
        self._attend_calls = self._update_calls = self._forward_tokens = 0
        self._broken = False

    # --- one forward of the model: begin_forward, attend per layer, end_forward (called by kvcore.attention)
    def begin_forward(self, batch: int, num_tokens: int, attention_mask: Tensor | None) -> None:
        """A forward of `num_tokens` tokens starts.

        Raises:
            ValueError: empty prompt, prompt beyond the model's length, more tokens than `prefill_tokens`.
            NotImplementedError: right padding, or padding inside a decode step.
            RuntimeError: an earlier forward failed half-way.
        """
        if num_tokens == 0:
            raise ValueError("the prompt must hold at least one token; received 0 tokens")
        if self._broken:
            raise RuntimeError(
                f"{self.method}: an earlier forward on this cache failed half-way, so that some layers have seen its "
                "tokens and others have not; call reset() and read the prompt again"
            )
        total = self._tokens + num_tokens
        if total > self.spec.max_positions:
            raise ValueError(
                f"{self.spec.backbone_id or 'the model'} was built for {self.spec.max_positions} tokens; this run "
                f"needs {total}. Shorten the prompt or the generation, or use a backbone with a longer context"
            )
        if self.phase is Phase.EMPTY:
            self.phase = Phase.PREFILL
            self._padding = [0] * batch
        if self.phase is Phase.PREFILL:
            expected = self.prefill_tokens or num_tokens
            if total > expected:
                raise ValueError(f"prefill_tokens={expected} but {total} prompt tokens arrived")
            self._padding = _left_padding(attention_mask, batch, total, total == expected, self.method)
        elif attention_mask is not None and not bool(attention_mask[:, -num_tokens:].all()):
            raise NotImplementedError(
                f"{self.method}: padding inside a decode step of {num_tokens} tokens is not supported; "
                "continue rows of unequal length one by one"
            )
        self.ledger.rows = batch
        self._forward_tokens = num_tokens
        self._attend_calls = self._update_calls = 0

    @property
    def _last_chunk(self) -> bool:
        return self.prefill_tokens is None or self._tokens + self._forward_tokens >= self.prefill_tokens

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attention output [B, Hq, Q, d] of one layer; stores the new keys and values."""
        self._attend_calls += 1
        layer = self.layers[layer_idx]
        if self.phase is Phase.DECODE:
            tokens = self._tokens + self._forward_tokens
            output = layer.attend(query, key, value, scale, tokens)
            if self.attend_observer is not None:
                self.attend_observer(layer, query, scale)
            self._record_attended(layer, tokens)
            self.ledger.h2d_bytes += layer.fetched_bytes
            return output
        keys, values = self._stage(layer_idx, key, value)
        output = prefill_attention(query, keys, values, scale, self._padding, window)
        self.take_prefill(layer_idx, query, keys, scale)
        return output

    def take_prefill(self, layer_idx: int, query: Tensor, keys: Tensor, scale: float) -> None:
        """Observe a staged prefill chunk of one layer, and compress the layer after the last one."""
        self.layers[layer_idx].observe(query, keys, self._padding, scale)
        if self._last_chunk:
            self.layer_prefilled(layer_idx, scale)

    def fail_forward(self) -> None:
        """A forward raised: layers before the fault hold its tokens, the others do not; only `reset` helps."""
        self._broken = True
        self._staged.clear()

    def end_forward(self, model: PreTrainedModel, input_ids: Tensor | None, hidden: Tensor) -> None:
        """A forward ended.

        Args:
            model: the causal LM (for its LM head).
            input_ids: [B, Q], or None when the model was called with embeddings.
            hidden: [B, Q, D] last hidden states, after the final norm.

        Raises:
            RuntimeError: the attention function was bypassed in some layer.
        """
        expected = len(self.layers)
        if self._attend_calls != expected or self._update_calls != expected:
            raise RuntimeError(
                f"{self.method}: the shared attention function saw {self._attend_calls} attention calls and the cache "
                f"{self._update_calls} updates in a forward of {expected} layers. The model does not route attention "
                "through transformers' attention interface (version or architecture change); results would be wrong"
            )
        self._tokens += self._forward_tokens
        for layer in self.layers:
            layer._length = self._tokens
            layer.is_initialized = True
        if self.phase is Phase.PREFILL:
            self.chunk_prefilled(model, input_ids, hidden)
            if self.prefill_tokens is None or self._tokens >= self.prefill_tokens:
                self.prompt_prefilled()
                self._staged.clear()
                self.phase = Phase.DECODE
                self._record_memory()
        else:
            self.step_finished(model, input_ids, hidden)
            self.ledger.decode_tokens += self._forward_tokens
            self._record_memory()
            links = {layer.link for layer in self.layers if layer.link is not None}
            self.ledger.h2d_stall_seconds = sum(link.stalled_seconds() for link in links)
        self._forward_tokens = 0  # a later forward that nobody announced is told by it

    # --- what a method may override
    def layer_prefilled(self, layer_idx: int, scale: float) -> None:
        """Every prompt token of a layer is staged: compress it at once, so that the prefill holds one full layer."""
        keys, values = self._staged[layer_idx]
        self._record_prefill_peak()
        self.layers[layer_idx].build(LayerPrompt(keys, values, self._padding, scale))
        del self._staged[layer_idx]

    def chunk_prefilled(self, model: PreTrainedModel, input_ids: Tensor | None, hidden: Tensor) -> None:
        """A prefill forward ended (see `end_forward` for the arguments); the place to compute surprisal."""

    def prompt_prefilled(self) -> None:
        """The whole prompt has been seen by every layer."""

    def step_finished(self, model: PreTrainedModel, input_ids: Tensor | None, hidden: Tensor) -> None:
        """A decode forward ended (see `end_forward` for the arguments)."""

    # --- lengths and memory
    @property
    def logical_length(self) -> int:
        """Tokens seen, padding included: the position of the next token."""
        return self._tokens

    @property
    def padding(self) -> list[int]:
        """Left-padding tokens of each row."""
        return list(self._padding)

    def row_tokens(self) -> list[int]:
        """Tokens seen by each row, padding excluded."""
        return [self._tokens - pad for pad in self._padding]

    def stored_states(self) -> list[BatchedState]:
        """Everything the ledger counts and the batch operations touch."""
        return list(self.layers)

    def memory_bytes(self) -> tuple[int, int]:
        """Bytes held now, as (device, host); staged prompt tokens are not included."""
        return storage_bytes(self.stored_states(), self.spec.device)

    def _record_memory(self) -> None:
        device_bytes, host_bytes = self.memory_bytes()
        self.ledger.record_memory(device_bytes, host_bytes, self.spec.token_bytes * sum(self.row_tokens()))

    def _record_prefill_peak(self) -> None:
        staged = sum(k.nbytes + v.nbytes for k, v in self._staged.values() if k.device == self.spec.device)
        device_bytes, _ = self.memory_bytes()
        self.ledger.prefill_device_bytes = max(self.ledger.prefill_device_bytes, staged + device_bytes)

    def _record_attended(self, layer: CacheLayer, tokens: int) -> None:
        mean_tokens = tokens - sum(self._padding) / max(len(self._padding), 1)
        self.ledger.record_attended(float(layer.attended) / mean_tokens)

    def _stage(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a prefill chunk; returns keys and values [B, Hkv, N, d] of the prompt so far."""
        if self.prefill_tokens is None or key.shape[2] == self.prefill_tokens:
            self._staged[layer_idx] = (key, value)
            return key, value
        if layer_idx not in self._staged:
            shape = (*key.shape[:2], self.prefill_tokens)
            self._staged[layer_idx] = (key.new_empty(*shape, key.shape[3]), value.new_empty(*shape, value.shape[3]))
        keys, values = self._staged[layer_idx]
        stop = self._tokens + key.shape[2]
        keys[:, :, self._tokens : stop], values[:, :, self._tokens : stop] = key, value
        return keys[:, :, :stop], values[:, :, :stop]

    # --- transformers interface
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._forward_tokens != key_states.shape[2]:
            raise RuntimeError(
                f"{self.method}: this cache was not announced a forward of {key_states.shape[2]} tokens. Attach the "
                "model first: build the cache with new_cache(model, ...) and call that same model"
            )
        self._update_calls += 1
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._tokens + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (int64, any order, repeats allowed)."""
        if self.phase is Phase.PREFILL:
            raise NotImplementedError(f"{self.method}: batch rows cannot be changed in the middle of a prefill")
        if self.phase is Phase.EMPTY:
            return
        for state in self.stored_states():
            state.select_rows(rows)
        self._padding = [self._padding[row] for row in rows.tolist()]
        self.ledger.rows = len(self._padding)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select_rows(indices if indices.dtype != torch.bool else indices.nonzero().flatten())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select_rows(torch.arange(len(self._padding)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens (`tokens_to_remove` is negative, as transformers passes it).

        Raises:
            NotImplementedError: the method cannot take back what it has compressed.
        """
        if tokens_to_remove == 0:
            return
        self._refuse_rollback("crop")
        for layer in self.layers:
            layer.crop(tokens_to_remove)
        self._tokens -= abs(tokens_to_remove)
        for layer in self.layers:
            layer._length = self._tokens

    def activate_past_recording(self) -> None:
        """Called by assisted and prompt-lookup decoding, which roll the cache back.

        Raises:
            NotImplementedError: the method cannot take back what it has compressed, or the cache holds tokens already:
                transformers would read the whole prompt again behind them, and answer wrongly without an error.
        """
        self._refuse_rollback("assisted or prompt-lookup decoding")
        if self._tokens:
            raise NotImplementedError(
                f"method '{self.method}' does not support assisted or prompt-lookup decoding on a cache that holds "
                f"{self._tokens} tokens: transformers reads the whole prompt again. Start from an empty cache, or use "
                "plain greedy, sampling or beam search"
            )

    def _refuse_rollback(self, feature: str) -> None:
        if not all(layer.is_croppable for layer in self.layers):
            raise NotImplementedError(
                f"method '{self.method}' does not support {feature}: compressed tokens cannot be taken back exactly. "
                "Use plain greedy, sampling or beam search, or method 'full'"
            )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(method={self.method}, budget={self.budget.value}, phase={self.phase.value}, "
            f"tokens={self._tokens})"
        )


def _left_padding(attention_mask: Tensor | None, batch: int, total: int, whole: bool, method: str) -> list[int]:
    """Left-padding tokens of each row, from the 2D attention mask of the prompt so far (`whole`: of all of it)."""
    if attention_mask is None:
        return [0] * batch
    if attention_mask.dim() != 2:
        raise NotImplementedError(
            f"{method}: a prepared {attention_mask.dim()}D attention mask is not supported; pass the 2D padding mask"
        )
    mask = attention_mask[:, :total].bool()
    padding = (~mask).sum(dim=1)
    expected = torch.arange(mask.shape[1], device=mask.device)[None] >= padding[:, None]
    if not bool((mask == expected).all()):
        raise NotImplementedError(
            f"{method}: only left padding is supported (tokenizer.padding_side='left'); the attention mask has zeros "
            "right of a token"
        )
    if whole and bool((padding == mask.shape[1]).any()):
        raise ValueError("every row of a batch must hold at least one token that is not padding")
    return [int(p) for p in padding.tolist()]

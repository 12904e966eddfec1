"""Eq. 2's data term: what a shared form loses, token by token and head by head.

Legend: J layers of the block, H' shared KV heads, G query heads per KV head, S streams, M middle tokens,
P probe queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freqdepth.compress import SharedFitter
from freqdepth.drafts import BlockInput, Draft
from kvcore.rope import shift_positions

# Tokens on which eq. 2 is evaluated in full.
_SAMPLE_TOKENS = 256
# A token's error stands out at this multiple of the mean. At 10% and 1K, 8 needles (full cache: 8) and the KL at 4K (2
# windows, nats): 3.0: 3, 0.0266; 2.0: 7, 0.0281; 1.6: 8, 0.0299.
_STANDING_OUT = 1.6


def sampled_losses(block: BlockInput, fitter: SharedFitter, draft: Draft, tokens: Tensor) -> Tensor:
    """Eq. 2's data term of some middle tokens: the probe queries' squared logit errors, weighed by what the token
    means to the probe, plus the same of the values' errors.

    Args:
        block: the input.
        fitter, draft: the shared form.
        tokens: [S, k] of each stream.

    Returns:
        [H', k].
    """
    heads = fitter.heads
    key_error, value_error = fitter.errors(0, draft.keys, tokens), fitter.errors(1, draft.values, tokens)
    if block.positions is not None:
        assert block.frequencies is not None
        key_error = shift_positions(key_error, block.positions[tokens].unsqueeze(0), block.frequencies)
    rows = tokens.expand(len(heads), -1)
    losses = torch.zeros(rows.shape, device=tokens.device)
    for layer, probe in enumerate(block.probes):
        queries = probe.queries[heads].flatten(1, 2)  # [H', G * P, d]
        logit_error = torch.matmul(queries, key_error[layer].mT).square_().mean(1)
        weight = block.token_weight[layer, heads]
        relative = weight / weight.mean(-1, keepdim=True).clamp_min(1e-30)
        value_loss = value_error[layer].square().sum(-1) * probe.value_weight[heads, None].square()
        losses += logit_error * weight.gather(1, rows) + value_loss * relative.gather(1, rows)
    return losses


def token_losses(block: BlockInput, fitter: SharedFitter, draft: Draft) -> Tensor:
    """Loss [H', m] of every head and middle token that a draft describes, in the shared form.

    With a KLT, a token's squared error in the metric domain is its expected loss, known without any reconstruction;
    the level of each head comes from eq. 2 itself on an even sample of tokens. With a DCT every token is evaluated.
    With `probe_weighting=mixed` a token whose error stands out counts whether the probe looks at it or not: text that
    repeats itself is described well by few coefficients, and the one sentence that does not must not be lost among it.
    """
    heads, stride = fitter.heads, draft.keys.stride
    streams, num_tokens = draft.keys.token_error.shape
    if fitter.options.basis != "klt":
        return sampled_losses(block, fitter, draft, torch.arange(num_tokens).expand(streams, -1))
    sample = torch.arange(0, num_tokens, max(1, num_tokens // _SAMPLE_TOKENS))
    level = sampled_losses(block, fitter, draft, (sample * stride).expand(streams, -1)).mean(-1)
    weight = block.token_weight[:, heads]
    relative = (weight[..., ::stride] / weight.mean(-1, keepdim=True).clamp_min(1e-30)).mean(0)  # [H', m]
    error = draft.keys.token_error + draft.values.token_error
    felt = error * relative
    level = level[:, None] / felt[:, sample].mean(-1, keepdim=True).clamp_min(1e-30)
    if fitter.options.probe_weighting == "mixed":
        outlying = error / (_STANDING_OUT * error.mean(-1, keepdim=True).clamp_min(1e-30))
        felt = felt + error * outlying.clamp_max(2) ** 4
    return level * felt

"""Token surprisal from the prefill's own hidden states, a block at a time. arXiv 2606.31145, section 3.1.

Legend: B batch rows, T tokens of one forward, n tokens of a block, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor, nn

from sekv.attention import softmax_and_unit

BLOCK_TOKENS = 1024
BLOCK_WORDS = 1024  # with BLOCK_TOKENS, 4 MiB of logits in fp32: they stay in cache, and no large block is ever mapped


class SurprisalMeter:
    """Collects H_t = -log p(x_t | x_<t) in nats over the chunks of a prompt; H_0 = 0.

    Rows with left padding: the first real token's surprisal is 0, padding is ignored by the callers.
    """

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self._last_hidden: Tensor | None = None

    @torch.no_grad()
    def add(self, lm_head: nn.Module, input_ids: Tensor, hidden: Tensor) -> None:
        """Take in one chunk.

        Args:
            lm_head: hidden states -> logits.
            input_ids: [B, T] of the chunk.
            hidden: [B, T, D] last hidden states of the chunk, after the final norm.
        """
        if self._last_hidden is None:
            self.pieces.append(torch.zeros(input_ids.shape[0], 1, device=hidden.device))
            context, targets = hidden[:, :-1], input_ids[:, 1:]
        else:
            context, targets = torch.cat([self._last_hidden, hidden[:, :-1]], dim=1), input_ids
        self._last_hidden = hidden[:, -1:].clone()
        if targets.shape[1]:
            self.pieces.append(surprisal(lm_head, context, targets))

    def values(self, padding: list[int]) -> Tensor:
        """[B, T] surprisal of every token so far (fp32), 0 at padding and at the first token of every row."""
        total = torch.cat(self.pieces, dim=1)
        first = torch.tensor(padding, device=total.device)[:, None]
        return total.masked_fill(torch.arange(total.shape[1], device=total.device)[None] <= first, 0.0)


@torch.no_grad()
def surprisal(lm_head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) [B, T] in nats (fp32) of hidden states [B, T, D]; logits exist for one block at a time only.

    Raises:
        ValueError: the LM head's weight is offloaded.
    """
    weight, bias = lm_head.weight, getattr(lm_head, "bias", None)
    assert isinstance(weight, Tensor)
    if weight.is_meta:
        raise ValueError("surprisal reads the LM head's weight, which is offloaded here; keep lm_head on a device")
    pieces = [
        _negative_log_probability(weight, bias, block, target)
        for block, target in zip(
            hidden.flatten(0, 1).split(BLOCK_TOKENS), targets.flatten().split(BLOCK_TOKENS), strict=True
        )
    ]
    return torch.cat(pieces).view(targets.shape)


def _negative_log_probability(weight: Tensor, bias: Tensor | None, hidden: Tensor, target: Tensor) -> Tensor:
    """[n] of hidden states [n, D] and target words [n], over slices of the vocabulary."""
    logits = (hidden.float() * weight[target].float()).sum(dim=-1)
    if bias is not None:
        logits = logits + bias[target].float()
    total: Tensor | None = None
    for start in range(0, weight.shape[0], BLOCK_WORDS):
        words = slice(start, start + BLOCK_WORDS)
        block = F.linear(hidden, weight[words], None if bias is None else bias[words])
        mass = softmax_and_unit(block.float())[1].squeeze(-1)
        total = mass if total is None else torch.logaddexp(total, mass)
    assert total is not None
    return total - logits

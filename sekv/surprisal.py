"""Token surprisal from the prefill's own hidden states, a block at a time. arXiv 2606.31145, section 3.1.

Legend: B batch rows, T tokens of one forward, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sekv.attention import softmax_and_unit

BLOCK_LOGITS = 16 * 1024 * 1024  # numbers of one block of logits: 64 MiB in fp32


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
    """-log p(target) [B, T] in nats (fp32) of hidden states [B, T, D]; logits exist for one block at a time only."""
    assert isinstance(lm_head.weight, Tensor)
    vocabulary = lm_head.weight.shape[0]
    block = max(1, BLOCK_LOGITS // (vocabulary * hidden.shape[0]))
    pieces = []
    for start in range(0, hidden.shape[1], block):
        logits = lm_head(hidden[:, start : start + block]).float()
        chosen = logits.gather(-1, targets[:, start : start + block, None]).squeeze(-1)
        pieces.append(softmax_and_unit(logits)[1].squeeze(-1) - chosen)
    return torch.cat(pieces, dim=1)

"""Teacher-forced next-token KL to the full cache, top-1 agreement and attention-mass coverage.

A window of `context + continuation` tokens: the context is prefilled and compressed, then the continuation is fed
`step_tokens` at a time. The full cache reads the same tokens, so both distributions are conditioned on the same text.

Legend: Q tokens of one step, V vocabulary, C continuation tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor

from kvcore.attention import cache_argument, prefill
from kvcore.backbone import Backbone
from kvcore.bench.base import Benchmark, MethodRun, Sample, register_bench
from kvcore.bench.fidelity.coverage import CoverageProbe
from kvcore.cache import CompressedCache
from kvcore.exact import ExactLayer
from kvcore.fanout import FanOutCache
from kvcore.method import build_method
from kvcore.text import data_files, load_documents, token_windows


@register_bench
@dataclass(frozen=True, kw_only=True)
class Fidelity(Benchmark):
    """Options of the fidelity benchmark.

    Attributes:
        contexts: context lengths in tokens, one group of windows each.
        documents: windows per context length.
        continuation: tokens scored after the context.
        step_tokens: continuation tokens per decode step; 1 is what generation does, more is faster.
        coverage_every: measure attention coverage at every this many steps; 0 leaves it out.
    """

    name: ClassVar[str] = "fidelity"
    metrics: ClassVar[dict[str, bool]] = {"kl": False, "agreement": True, "coverage": True}

    contexts: tuple[int, ...] = (4096,)
    documents: int = 24
    continuation: int = 128
    step_tokens: int = 1
    coverage_every: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "contexts", tuple(self.contexts))
        if self.documents < 1:
            raise ValueError(f"bench.fidelity.documents must be >= 1; received {self.documents}")
        if self.continuation < 2:  # the last token is never fed, so one alone would be predicted from no step
            raise ValueError(f"bench.fidelity.continuation must be >= 2 tokens; received {self.continuation}")
        if not self.contexts or min(self.contexts) < 1:
            raise ValueError(f"bench.fidelity.contexts must be token counts >= 1; received {list(self.contexts)}")
        if self.step_tokens < 1 or self.coverage_every < 0:
            raise ValueError(
                "bench.fidelity.step_tokens must be >= 1 and coverage_every >= 0; received "
                f"{self.step_tokens} and {self.coverage_every}"
            )

    def check(self) -> None:
        if self.data_dir is not None:
            data_files(self.data_dir)

    def samples(self, backbone: Backbone) -> Sequence[Sample]:
        documents = load_documents(self.data_dir)
        count = min(self.documents, self.limit or self.documents)
        samples = []
        for context in self.contexts:
            total = context + self.continuation
            if total > backbone.spec.max_positions:
                raise ValueError(
                    f"bench.fidelity needs {total} tokens (context {context} + continuation {self.continuation}); "
                    f"{backbone.config.name} was built for {backbone.spec.max_positions}. Lower bench.fidelity.contexts"
                )
            for window in token_windows(documents, backbone.tokenizer, total, count, self.seed):
                samples.append(
                    Sample(
                        id=window.id,
                        task=window.domain,
                        context_length=context,
                        meta={"token_ids": window.token_ids},
                    )
                )
        return samples

    @torch.inference_mode()
    def run(self, backbone: Backbone, sample: Sample, runs: Sequence[MethodRun]) -> list[dict[str, Any]]:
        assert sample.context_length is not None
        ids = torch.tensor([sample.meta["token_ids"]], device=backbone.device)
        context, continuation = ids[:, : sample.context_length], ids[:, sample.context_length :]
        teacher = build_method("full").new_cache(backbone.model)
        caches = [run.new_cache(backbone) for run in runs]
        shared = FanOutCache([teacher, *caches])
        began = time.perf_counter()
        prefill(backbone.model, shared, context, chunk_size=backbone.config.prefill_chunk)
        forward_seconds = time.perf_counter() - began - sum(shared.seconds)
        # the last continuation token predicts nothing that is scored; the context's last logits are the same for all
        fed = continuation[:, :-1]
        context_keys = [(layer.keys, layer.values) for layer in teacher.layers if isinstance(layer, ExactLayer)]
        target, _ = self._teacher_forced(backbone, teacher, fed, continuation.shape[1])
        rows: list[dict[str, Any]] = []
        for run, cache, seconds in zip(runs, caches, shared.seconds[1:], strict=True):
            probe = CoverageProbe(cache, context_keys, self.coverage_every, attends_all=run.method.attends_all)
            with probe:
                log_probs, decode_seconds = self._teacher_forced(backbone, cache, fed, self.step_tokens)
            kl = F.kl_div(log_probs, target, log_target=True, reduction="none").sum(-1)
            agreement = (log_probs.argmax(-1) == target.argmax(-1)).float()
            metrics = {"kl": float(kl.mean()), "agreement": float(agreement.mean())}
            if probe.coverage is not None:
                metrics["coverage"] = probe.coverage
            rows.append(
                {
                    "prediction": None,
                    "references": [],
                    "metrics": metrics,
                    **cache.ledger.as_row(),
                    "prefill_seconds": forward_seconds + seconds,
                    "ms_per_token": 1000 * decode_seconds / max(fed.shape[1], 1),
                }
            )
        return rows

    def _teacher_forced(
        self, backbone: Backbone, cache: CompressedCache, fed: Tensor, step: int
    ) -> tuple[Tensor, float]:
        """Next-token log-probabilities [C - 1, V] (fp32) after each fed token, and the seconds spent decoding."""
        began = time.perf_counter()
        pieces = []
        for start in range(0, fed.shape[1], step):
            logits = backbone.model(input_ids=fed[:, start : start + step], **cache_argument(cache)).logits
            pieces.append(torch.log_softmax(logits[0].float(), dim=-1))
        seconds = time.perf_counter() - began
        return torch.cat(pieces), seconds

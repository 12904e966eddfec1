"""Benchmarks that generate an answer: one shared prefill of the context, then question and answer per cache.

The context is compressed before the question is seen (unless `compress_question`), for every method alike. Consecutive
samples with the same context (few-shot prompts) share one prefill: each question runs on a deep copy.
"""

from __future__ import annotations

import copy
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from kvcore.attention import prefill
from kvcore.backbone import Backbone
from kvcore.bench.base import Benchmark, MethodRun, Sample
from kvcore.cache import CompressedCache
from kvcore.chat import Prompt, build_prompt
from kvcore.fanout import FanOutCache


@dataclass(frozen=True, kw_only=True)
class GenerationBenchmark(Benchmark):
    """A benchmark whose samples are answered by greedy decoding."""

    @abstractmethod
    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Metrics of one answer (the new tokens decoded, special tokens skipped, nothing stripped)."""

    def prompt(self, backbone: Backbone, sample: Sample) -> Prompt:
        """Token ids of a sample.

        Raises:
            ValueError: prompt and answer do not fit the model's context length.
        """
        prompt = build_prompt(
            backbone.tokenizer,
            sample.context,
            sample.question,
            chat=sample.chat and backbone.config.instruct,
            answer_prefix=sample.answer_prefix,
            system=sample.system,
            enable_thinking=backbone.config.enable_thinking,
        )
        total = len(prompt.ids) + sample.max_new_tokens
        if total > backbone.spec.max_positions:
            raise ValueError(
                f"bench {self.name}, task {sample.task}, sample {sample.id}: the prompt holds {len(prompt.ids)} tokens "
                f"and {sample.max_new_tokens} are to be generated, {total} in all; {backbone.config.name} was built "
                f"for {backbone.spec.max_positions}. Use a shorter context or a backbone with a longer one"
            )
        return prompt

    def run(self, backbone: Backbone, sample: Sample, runs: Sequence[MethodRun]) -> list[dict[str, Any]]:
        return self.run_group(backbone, [sample], runs)[0]

    @torch.inference_mode()
    def run_group(
        self, backbone: Backbone, samples: Sequence[Sample], runs: Sequence[MethodRun]
    ) -> list[list[dict[str, Any]]]:
        """Rows of several samples that have the same context: [sample][run]."""
        prompts = [self.prompt(backbone, sample) for sample in samples]
        shared = not self.compress_question and len({tuple(p.context_ids) for p in prompts}) == 1
        if len(samples) > 1 and not shared:
            return [self.run_group(backbone, [sample], runs)[0] for sample in samples]
        prefilled = prompts[0].context_ids if not self.compress_question else prompts[0].ids[:-1]
        caches = [run.new_cache(backbone) for run in runs]
        seconds = [0.0] * len(caches)
        if prefilled:
            fan_out = FanOutCache(caches)
            began = time.perf_counter()
            ids = torch.tensor([prefilled], device=backbone.device)
            prefill(backbone.model, fan_out, ids, chunk_size=backbone.config.prefill_chunk)
            forward = time.perf_counter() - began - sum(fan_out.seconds)
            seconds = [forward + own for own in fan_out.seconds]
        rows = []
        for index, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
            last = index == len(samples) - 1
            answers = []
            for cache, prefill_seconds in zip(caches, seconds, strict=True):
                one = cache if last else copy.deepcopy(cache)
                answers.append(self._answer(backbone, sample, prompt, one, prefill_seconds))
            rows.append(answers)
        return rows

    def _answer(
        self, backbone: Backbone, sample: Sample, prompt: Prompt, cache: CompressedCache, prefill_seconds: float
    ) -> dict[str, Any]:
        began = time.perf_counter()
        new_ids = greedy_answer(backbone, sample, prompt.ids, cache)
        decode_seconds = time.perf_counter() - began
        prediction = str(backbone.tokenizer.decode(new_ids, skip_special_tokens=True))
        return {
            "prediction": prediction,
            "references": list(sample.references),
            "metrics": self.score(sample, prediction),
            "new_tokens": len(new_ids),
            "prompt_tokens": len(prompt.ids),
            "truncated": sample.truncated,
            **cache.ledger.as_row(),
            "prefill_seconds": prefill_seconds,
            "ms_per_token": 1000 * decode_seconds / max(len(new_ids), 1),
        }


class StopStrings(StoppingCriteria):
    """Stops a row as soon as its answer contains one of the strings; only the newest tokens are decoded.

    Args:
        tokenizer: decodes the answer.
        strings: stop strings.
        prompt_tokens: tokens before the answer.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt_tokens: int) -> None:
        self.tokenizer, self.strings, self.prompt_tokens = tokenizer, tuple(strings), prompt_tokens
        # a token is at least one character, two more allow for a string that starts inside a token
        self.window = max(map(len, self.strings)) + 2

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        answers = input_ids[:, self.prompt_tokens :][:, -self.window :]
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        done = [any(string in text for string in self.strings) for text in texts]
        return torch.tensor(done, device=input_ids.device)


def greedy_answer(backbone: Backbone, sample: Sample, ids: list[int], cache: CompressedCache) -> list[int]:
    """Greedy continuation of a prompt whose head the cache may already hold; stops at every EOS id and stop string.

    Returns:
        The new token ids, the ending EOS included if there was one.
    """
    eos = [*backbone.eos_ids, *sample.extra_eos_ids]
    config = GenerationConfig(
        max_new_tokens=sample.max_new_tokens,
        min_new_tokens=sample.min_new_tokens or None,
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=backbone.tokenizer.pad_token_id,
    )
    stopping = StoppingCriteriaList()
    if sample.stop:
        stopping.append(StopStrings(backbone.tokenizer, sample.stop, len(ids)))
    input_ids = torch.tensor([ids], device=backbone.device)
    generate: Any = backbone.model.generate
    output = generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        generation_config=config,
        stopping_criteria=stopping,
        cache=cache,
    )
    assert isinstance(output, torch.Tensor)
    return output[0, len(ids) :].tolist()

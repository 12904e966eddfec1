"""Benchmarks that generate an answer: one shared prefill of the context, then question and answer per cache.

The context is compressed before the question is seen (unless `compress_question`), for every method alike. Consecutive
samples with the same context (few-shot prompts) share one prefill: each question runs on a deep copy. With
`batch_size`, samples of similar lengths are read and answered together (`kvcore.bench.batching`).
"""

from __future__ import annotations

import copy
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from kvcore.attention import cache_argument, prefill
from kvcore.backbone import Backbone
from kvcore.bench.base import Benchmark, MethodRun, Sample
from kvcore.bench.batching import batches
from kvcore.bench.stopping import EndAfterThinking, RowEnds, StopStrings, answer_after_thinking
from kvcore.cache import CompressedCache
from kvcore.chat import Prompt, build_prompt
from kvcore.fanout import FanOutCache


@dataclass(frozen=True, kw_only=True)
class GenerationBenchmark(Benchmark):
    """A benchmark whose samples are answered by greedy decoding.

    Attributes:
        batch_size: most samples that are read and answered together; the rows are those of single samples up to
            floating-point noise.
    """

    batch_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < 1:
            raise ValueError(f"bench.{self.name}.batch_size must be >= 1 sample; received {self.batch_size}")

    @abstractmethod
    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        """Metrics of one answer: the new tokens decoded, without special tokens and without thoughts."""

    def prompt(self, backbone: Backbone, sample: Sample) -> Prompt:
        """Token ids of a sample.

        Raises:
            ValueError: prompt and answer do not fit the model's context length.
        """
        thinking = backbone.thinking_room(sample.chat)
        prompt = build_prompt(
            backbone.tokenizer,
            sample.context,
            sample.question,
            chat=sample.chat and backbone.config.instruct,
            # the beginning of the answer in front of the thoughts would leave them out
            answer_prefix="" if thinking else sample.answer_prefix,
            system=sample.system,
            enable_thinking=backbone.config.enable_thinking,
        )
        new_tokens = sample.max_new_tokens + thinking
        total = len(prompt.ids) + new_tokens
        if total > backbone.spec.max_positions:
            raise ValueError(
                f"bench {self.name}, task {sample.task}, sample {sample.id}: the prompt holds {len(prompt.ids)} tokens "
                f"and {new_tokens} are to be generated, {total} in all; {backbone.config.name} was built "
                f"for {backbone.spec.max_positions}. Use a shorter context or a backbone with a longer one"
            )
        return prompt

    def run(self, backbone: Backbone, sample: Sample, runs: Sequence[MethodRun]) -> list[dict[str, Any]]:
        return self.run_group(backbone, [sample], runs)[0]

    def read_first(self, prompt: Prompt) -> list[int]:
        """The tokens that are read and compressed before the rest of the prompt."""
        return prompt.ids[:-1] if self.compress_question else prompt.context_ids

    def lengths(self, backbone: Backbone, sample: Sample) -> tuple[int, int]:
        """Tokens read first, and tokens of the rest of the prompt."""
        prompt = self.prompt(backbone, sample)
        head = len(self.read_first(prompt))
        return head, len(prompt.ids) - head

    @torch.inference_mode()
    def run_group(
        self, backbone: Backbone, samples: Sequence[Sample], runs: Sequence[MethodRun]
    ) -> list[list[dict[str, Any]]]:
        """Rows of several samples: [sample][run]. One context is read once, different ones batch by batch."""
        prompts = [self.prompt(backbone, sample) for sample in samples]
        heads = [self.read_first(prompt) for prompt in prompts]
        lengths = [(len(head), len(prompt.ids) - len(head)) for head, prompt in zip(heads, prompts, strict=True)]
        shared = bool(heads[0]) and all(head == heads[0] for head in heads)
        prefilled = self._prefilled(backbone, heads[:1], runs) if shared else None
        rows: dict[int, list[dict[str, Any]]] = {}
        made = batches(samples, lengths, self.batch_size)
        for members in made:
            read = prefilled or self._prefilled(backbone, [heads[index] for index in members], runs)
            batch = [(samples[index], prompts[index]) for index in members]
            answers = []
            for cache, seconds in read:
                one = copy.deepcopy(cache) if shared and members is not made[-1] else cache
                if shared and len(members) > 1:
                    one.batch_repeat_interleave(len(members))
                answers.append(self._answers(backbone, batch, one, seconds, 1 if shared else len(members)))
            for row, index in enumerate(members):
                rows[index] = [of_run[row] for of_run in answers]
        return [rows[index] for index in range(len(samples))]

    def _prefilled(
        self, backbone: Backbone, heads: Sequence[list[int]], runs: Sequence[MethodRun]
    ) -> list[tuple[CompressedCache, float]]:
        """For each run a cache that has read `heads` as one batch, and the seconds per head that it took."""
        caches = [run.new_cache(backbone) for run in runs]
        if not any(heads):
            return [(cache, 0.0) for cache in caches]
        fan_out = FanOutCache(caches)
        began = time.perf_counter()
        ids, mask = left_padded(backbone, heads)
        attention_mask = None if bool(mask.all()) else mask
        chunk_size = backbone.config.prefill_chunk
        prefill(backbone.model, fan_out, ids, attention_mask=attention_mask, chunk_size=chunk_size)
        forward = time.perf_counter() - began - sum(fan_out.seconds)
        return [(cache, (forward + own) / len(heads)) for cache, own in zip(caches, fan_out.seconds, strict=True)]

    def _answers(
        self,
        backbone: Backbone,
        batch: Sequence[tuple[Sample, Prompt]],
        cache: CompressedCache,
        prefill_seconds: float,
        prefill_rows: int,
    ) -> list[dict[str, Any]]:
        """Result rows of one batch.

        The ledger measures the batch: bytes are given as a sample's equal part of it (those of the prefill of
        `prefill_rows`), shares and traffic per token as the batch's mean, and a token's time as the batch's time over
        all of its answers' tokens. Rows that have ended stay in the cache until the batch ends, and count.
        """
        began = time.perf_counter()
        answers = greedy_answers(backbone, batch[0][0], [prompt.ids for _, prompt in batch], cache)
        decode_seconds = time.perf_counter() - began
        ledger = cache.ledger.as_row()
        parts = {"device_bytes": len(batch), "host_bytes": len(batch), "prefill_device_bytes": prefill_rows}
        ledger |= {column: -(-int(ledger[column]) // rows) for column, rows in parts.items()}
        result = []
        for (sample, prompt), new_ids in zip(batch, answers, strict=True):
            prediction = str(backbone.tokenizer.decode(new_ids, skip_special_tokens=True))
            thinks = backbone.thinking_room(sample.chat) > 0
            if thinks:
                prediction = answer_after_thinking(prediction)
            result.append(
                {
                    "prediction": prediction,
                    "references": list(sample.references),
                    "metrics": self.score(sample, prediction),
                    "new_tokens": len(new_ids),
                    "prompt_tokens": len(prompt.ids),
                    "truncated": sample.truncated,
                    "thinking": thinks,
                    "batch": len(batch),
                    **ledger,
                    "prefill_seconds": prefill_seconds,
                    "ms_per_token": 1000 * decode_seconds / max(sum(map(len, answers)), 1),
                }
            )
        return result


def left_padded(backbone: Backbone, prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask [B, longest] of prompts of several lengths."""
    width = max(map(len, prompts))
    padding = backbone.tokenizer.pad_token_id or 0
    ids = [[padding] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=backbone.device), torch.tensor(mask, device=backbone.device)


def greedy_answers(
    backbone: Backbone, sample: Sample, prompts: Sequence[list[int]], cache: CompressedCache
) -> list[list[int]]:
    """Greedy continuations of prompts whose heads the cache may already hold; each ends at an EOS id or stop string.

    Args:
        backbone: the model.
        sample: limits and stops, the same for every prompt.
        prompts: token ids; left-padded to the longest.
        cache: empty, or with the head of every prompt.

    Returns:
        The new token ids of each prompt, the ending EOS included if there was one.
    """
    thinking = backbone.thinking_room(sample.chat)
    # ends of the task's own (a line end) would end the thinking
    eos = [*backbone.eos_ids, *(() if thinking else sample.extra_eos_ids)]
    config = GenerationConfig(
        max_new_tokens=sample.max_new_tokens + thinking,
        min_new_tokens=sample.min_new_tokens or None,
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=backbone.tokenizer.pad_token_id,
    )
    input_ids, mask = left_padded(backbone, prompts)
    width = input_ids.shape[1]
    stops: list[RowEnds] = []
    if thinking:
        stops.append(EndAfterThinking(backbone.tokenizer, sample.stop, width, sample.max_new_tokens))
    elif sample.stop:
        stops.append(StopStrings(backbone.tokenizer, sample.stop, width))
    generate: Any = backbone.model.generate
    output = generate(
        input_ids=input_ids,
        attention_mask=mask,
        generation_config=config,
        stopping_criteria=StoppingCriteriaList(stops),
        **cache_argument(cache),
    )
    assert isinstance(output, torch.Tensor)
    answers = []
    for row, new_ids in enumerate(output[:, width:].tolist()):
        # a row that ended before the others goes on with padding
        at_eos = next((index + 1 for index, token in enumerate(new_ids) if token in eos), len(new_ids))
        answers.append(new_ids[: min([at_eos, *(stop.ends.get(row, at_eos) for stop in stops)])])
    return answers

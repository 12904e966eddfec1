"""The needle grid: context length x depth x haystack, recall of the needle's facts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvcore.backbone import Backbone
from kvcore.bench.base import Sample, register_bench
from kvcore.bench.generation import GenerationBenchmark
from kvcore.bench.niah.haystack import Haystack, plant
from kvcore.bench.niah.scoring import needle_recall
from kvcore.text import data_files

PLACES = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Tallinn", "Perth", "Dakar", "Osaka", "Bergen")
NEEDLE = "The special magic number for {place} is {number}."
HEAD = "Some special magic numbers are hidden in the following text. Remember them. I will ask about one of them.\n\n"
QUESTION = "\n\nWhat is the special magic number for {place} mentioned in the text? Answer with the number only."


@register_bench
@dataclass(frozen=True, kw_only=True)
class NeedleInAHaystack(GenerationBenchmark):
    """Options of the needle benchmark.

    Attributes:
        contexts: haystack lengths in tokens of the evaluated model, needle included.
        depths: needle positions, 0.0 the beginning and 1.0 the end.
        haystacks: `essay` (embedded text or `data_dir`) and/or `noise` (repeated sentences).
        max_new_tokens: answer length.
    """

    name: ClassVar[str] = "niah"
    metrics: ClassVar[dict[str, bool]] = {"recall": True}
    proportions: ClassVar[dict[str, float]] = {"recall": 1.0}

    contexts: tuple[int, ...] = (1024, 2048, 4096)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    haystacks: tuple[str, ...] = ("essay", "noise")
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("contexts", "depths", "haystacks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.contexts or min(self.contexts) < 64:
            raise ValueError(f"bench.niah.contexts must be token counts >= 64; received {list(self.contexts)}")
        if not self.depths or min(self.depths) < 0 or max(self.depths) > 1:
            raise ValueError(f"bench.niah.depths must lie in 0.0..1.0; received {list(self.depths)}")
        unknown = set(self.haystacks) - {"essay", "noise"}
        if unknown or not self.haystacks:
            raise ValueError(f"bench.niah.haystacks must hold 'essay' or 'noise'; received {list(self.haystacks)}")

    def check(self) -> None:
        if self.data_dir is not None:
            data_files(self.data_dir)

    def samples(self, backbone: Backbone) -> Sequence[Sample]:
        rng = random.Random(self.seed)
        samples = []
        for kind in self.haystacks:
            haystack = Haystack.load(kind, self.data_dir)
            for context in self.contexts:
                for depth in self.depths:
                    place, number = rng.choice(PLACES), str(rng.randrange(1_000_000, 10_000_000))
                    needle = NEEDLE.format(place=place, number=number)
                    needle_tokens = len(backbone.tokenizer(needle, add_special_tokens=False).input_ids)
                    text = plant(haystack.cut(backbone.tokenizer, context - needle_tokens), needle, depth)
                    samples.append(
                        Sample(
                            id=f"{kind}-{context}-{depth:.2f}",
                            task=kind,
                            context=HEAD + text,
                            question=QUESTION.format(place=place),
                            references=(number,),
                            max_new_tokens=self.max_new_tokens,
                            context_length=context,
                            meta={"depth": depth},
                        )
                    )
        if self.limit is None:
            return samples
        return [s for kind in self.haystacks for s in [s for s in samples if s.task == kind][: self.limit]]

    def score(self, sample: Sample, prediction: str) -> dict[str, float]:
        return {"recall": needle_recall(prediction, sample.references)}

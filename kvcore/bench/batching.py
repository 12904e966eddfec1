"""Which samples are run together: those that share a context, and those of similar lengths, as one left-padded batch.

A batch must give the rows that its samples give alone. Its contexts are padded on the left, which every method allows;
its questions must hold equally many tokens, since rows of a decode step cannot be padded and another split into steps
would be another result for methods that choose once a step.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from kvcore.bench.base import Sample

LARGEST_GROUP = 16
# of the longest prompt of a batch: stores are as wide as their longest row, so this keeps the padding, which counts as
# device bytes, within 2% of them
SHORTEST_SHARE = 0.98

Lengths = Sequence[tuple[int, int]]
Numbered = list[tuple[int, Sample]]


def batches(samples: Sequence[Sample], lengths: Lengths, size: int) -> list[list[int]]:
    """Indices of samples that are answered together, at most `size` each; every index once.

    Args:
        samples: of one benchmark.
        lengths: of each sample, (tokens read before the question, tokens of the question).
        size: most rows of a batch.
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for index, (sample, (context, question)) in enumerate(zip(samples, lengths, strict=True)):
        # without a context the prompt is read by the generation itself, which pads on the left
        alike[_settings(sample), question if context else None].append(index)
    made = []
    for members in alike.values():
        batch: list[int] = []
        for index in sorted(members, key=lambda index: -sum(lengths[index])):
            if batch and (len(batch) == size or sum(lengths[index]) < SHORTEST_SHARE * sum(lengths[batch[0]])):
                made.append(sorted(batch))
                batch = []
            batch.append(index)
        made.append(sorted(batch))
    return sorted(made)


def _settings(sample: Sample) -> Hashable:
    """What the rows of one generation have in common."""
    return sample.max_new_tokens, sample.min_new_tokens, sample.stop, sample.extra_eos_ids, sample.chat


def work_groups(
    samples: Numbered, num_processes: int = 1, *, share_context: bool = True, batch_size: int = 1, lengths: Lengths = ()
) -> list[Numbered]:
    """Samples with their numbers, in groups that one process finishes before their rows are stored.

    Consecutive samples with one context share its prefill. Such a group is cut: every process gets a share of a context
    that all samples have (few-shot prompts), and an interrupted run loses at most `LARGEST_GROUP` samples. The others
    are put into batches.

    Args:
        samples: all samples of a benchmark, numbered from 0.
        num_processes: that share the groups.
        share_context: whether a context may be read once for several samples.
        batch_size: most rows of a batch.
        lengths: see `batches`; needed for a batch size above 1.

    Returns:
        The groups in the order in which they are run (see `in_turns`).
    """
    made: list[Numbered] = []
    single: Numbered = []

    def shared(item: tuple[int, Sample]) -> Hashable:
        return (item[1].context, item[1].task) if share_context else item[0]

    for _, group in itertools.groupby(samples, key=shared):
        members = list(group)
        if len(members) == 1:
            single += members
            continue
        if batch_size > 1:  # questions of one length side by side
            members.sort(key=lambda item: lengths[item[0]][1])
        size = max(1, min(LARGEST_GROUP, -(-len(members) // num_processes)))
        made += [members[start : start + size] for start in range(0, len(members), size)]
    if batch_size == 1:
        made += [[one] for one in single]
    else:
        size = max(1, min(batch_size, -(-len(single) // num_processes)))
        of_single = [lengths[number] for number, _ in single]
        made += [[single[i] for i in batch] for batch in batches([sample for _, sample in single], of_single, size)]
    return in_turns(sorted(made, key=lambda group: min(number for number, _ in group)))


def in_turns(groups: Sequence[Numbered]) -> list[Numbered]:
    """The groups, every task and length having its first before any has its second: what an interrupted run has
    finished says something of all of them."""
    taken: Counter[Hashable] = Counter()
    turns = []
    for group in groups:
        place = group[0][1].task, group[0][1].context_length
        turns.append(taken[place])
        taken[place] += 1
    return [group for _, group in sorted(zip(turns, groups, strict=True), key=lambda pair: pair[0])]

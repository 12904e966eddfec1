"""SentenceKV against a literal reading of section 3 of https://arxiv.org/abs/2504.00970."""

import math

import pytest
import torch
from retrieval_cases import (
    GROUP,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    SCALE,
    build_layers,
    exact_entries,
    feed,
    generate,
    literal_attention,
    make_case,
)

from kvcore.baselines import sentencekv
from kvcore.method import build_method

DOT = 7


def text_ids(total, seed=0):
    """Token ids with a sentence end (7) every 3 to 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, 200, (total,), generator=generator)
    position = 0
    while position < total:
        position += int(torch.randint(3, 13, (1,), generator=generator))
        if position < total:
            ids[position] = DOT
    return ids


def literal_sentences(ids):
    """Sentences as lists of positions: each ends with its delimiter."""
    sentences, current = [], []
    for position, token in enumerate(ids.tolist()):
        current.append(position)
        if token == DOT:
            sentences.append(current)
            current = []
    return [*sentences, current] if current else sentences


def literal_importance(case, head, window, kernel):
    """Attention that each prompt token gets from the last queries, group mean, then max pooling."""
    mass = [0.0] * case.prompt
    for query_head in range(head * GROUP, (head + 1) * GROUP):
        for position in range(case.prompt - window, case.prompt):
            logits = [
                float(case.queries[query_head, position] @ case.keys[head, t]) * SCALE for t in range(position + 1)
            ]
            top = max(logits)
            total = sum(math.exp(x - top) for x in logits)
            for t, logit in enumerate(logits):
                mass[t] += math.exp(logit - top) / total / GROUP
    half = kernel // 2
    return [max(mass[max(0, t - half) : t + half + 1]) for t in range(case.prompt)]


@pytest.fixture
def ids(monkeypatch):
    """The ids of the forward under way, as the attention function would give them."""
    current = {"ids": None}
    monkeypatch.setattr(sentencekv, "active_input_ids", lambda: current["ids"])
    return current


@pytest.mark.parametrize("keeping_factor", [2.0, 50.0])
def test_kept_tokens_and_outputs_equal_the_paper_formula(ids, keeping_factor):
    case, steps = make_case(prompt=120, steps=8), 8
    text = text_ids(128)
    ids["ids"] = text[None, :120]
    options = {"delimiter_ids": (DOT,), "keeping_factor": keeping_factor, "observation_window": 8}
    layer = build_layers("sentencekv", 0.35, [case], **options)
    sinks = int(layer.resident.sink_counts[0])
    window = int(layer.resident.counts[0])
    units = float(layer.unit_tokens[0])
    count = layer.planner.split(120, units).fetched
    middle = range(sinks, 120 - window)
    keep = min(len(middle), int(keeping_factor * count))
    kept = []
    for head in range(NUM_KV_HEADS):
        score = literal_importance(case, head, 8, 7)
        kept.append(sorted(sorted(middle, key=lambda t, score=score: -score[t])[:keep]))
    for head in range(NUM_KV_HEADS):
        torch.testing.assert_close(layer.host.keys[0, head, :keep], case.keys[head, kept[head]])
    assert (keep < len(middle)) == (keeping_factor == 2.0)

    sentences = literal_sentences(text[:120])
    assert units == 120 / len(sentences)
    queries = torch.zeros(NUM_HEADS, HEAD_DIM)
    spoken = 0
    for offset in range(steps):
        token = 120 + offset
        ids["ids"] = text[None, token : token + 1]
        output = feed(layer, [case], offset)[0, :, 0]
        if offset and text[token - 1] == DOT:
            queries, spoken = torch.zeros(NUM_HEADS, HEAD_DIM), 0
        queries, spoken = queries + case.queries[:, token], spoken + 1
        start = token + 1 - int(layer.resident.counts[0])
        spilled = list(range(120 - window, start))
        entries = []
        for head in range(NUM_KV_HEADS):
            groups = [[t for t in sentence if t in set(kept[head])] for sentence in sentences]
            groups = [group for group in groups if group]
            groups = merge_spilled(groups, sentences, spilled, text)
            mean_query = queries[head * GROUP : (head + 1) * GROUP].mean(0) / spoken
            ranked = sorted(
                groups,
                key=lambda g, head=head, q=mean_query: -float(q @ case.keys[head, g].mean(0)),
            )
            fetched = [t for group in ranked for t in group][: layer.planner.split(token + 1, units).fetched]
            entries.append(exact_entries(case, head, [*range(sinks), *fetched, *range(start, token + 1)]))
        torch.testing.assert_close(output, literal_attention(case, token, entries), atol=1e-4, rtol=1e-4)


def merge_spilled(groups, sentences, spilled, text):
    """What left the window joins its own sentence if a part of that is there already, else opens a unit."""
    groups = [list(group) for group in groups]
    for token in spilled:
        if text[token - 1] == DOT:
            groups.append([token])
        else:
            groups[-1].append(token)
    return groups


def test_sentences_merge_where_their_means_would_not_fit(ids):
    case = make_case(prompt=400, steps=1)
    ids["ids"] = torch.full((1, 400), DOT).where(torch.arange(400) % 2 == 0, torch.tensor(50))
    layer = build_layers("sentencekv", 0.1, [case], delimiter_ids=(DOT,))
    assert 400 / int(layer.unit_counts[0]) > 8
    feed(layer, [case], 0)
    assert layer.fetched_bytes > 0


def test_rows_keep_their_own_sentences():
    generator = torch.Generator().manual_seed(3)
    long = torch.randint(20, 200, (1, 90), generator=generator)
    long[0, ::9] = DOT
    short = long[:, 30:]
    padded = torch.cat([torch.zeros(1, 30, dtype=torch.long), short], dim=1)
    both, mask = torch.cat([long, padded]), torch.ones(2, 90, dtype=torch.long)
    mask[1, :30] = 0
    options = {"delimiter_ids": (DOT,), "new": 20}
    alone, _ = generate("sentencekv", 0.3, short, torch.ones_like(short), **options)
    together, _ = generate("sentencekv", 0.3, both, mask, **options)
    assert together[1].tolist() == alone[0].tolist()


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="pooling_kernel must be odd; received 4"):
        build_method("sentencekv", pooling_kernel=4)

"""SemantiCache against its description, written out token by token."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from evicting_cases import GROUP, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE, make_layers, make_row, prompt_of

from kvcore.baselines.semanticache import fitted_clusters, greedy_clusters, merge_chunks
from kvcore.delimiters import CLAUSE_END, chunk_ids, delimiter_token_ids
from kvcore.method import build_method
from kvcore.tiny import build_tiny, byte_tokenizer


def literal_clusters(keys, threshold):
    """Greedy seed clustering of the tokens [n, d] of one chunk: lists of positions, the seed first."""
    free, clusters = list(range(len(keys))), []
    while free:
        seed = free[0]
        near = [t for t in free[1:] if float(F.cosine_similarity(keys[seed], keys[t], dim=0)) >= threshold]
        clusters.append([seed, *near])
        free = [t for t in free if t not in clusters[-1]]
    return clusters


@pytest.mark.parametrize("threshold", [-1.01, 0.0, 0.3, 0.9])
def test_clusters_equal_the_greedy_algorithm(threshold):
    lengths, longest = [7, 12, 1], 12
    keys = torch.randn(NUM_KV_HEADS, 3, longest, 4, generator=torch.Generator().manual_seed(0))
    valid = torch.arange(longest) < torch.tensor(lengths)[:, None]
    unit = F.normalize(keys, dim=-1)
    seeds = greedy_clusters(unit @ unit.transpose(-1, -2), valid, torch.full((NUM_KV_HEADS,), threshold))
    for head in range(NUM_KV_HEADS):
        for chunk, length in enumerate(lengths):
            for cluster in literal_clusters(keys[head, chunk, :length], threshold):
                assert seeds[head, chunk, cluster].tolist() == [cluster[0]] * len(cluster)
            assert (seeds[head, chunk, length:] == -1).all()


def test_threshold_is_the_highest_that_fits():
    keys = F.normalize(torch.randn(2, 4, 10, 4, generator=torch.Generator().manual_seed(1)), dim=-1)
    similarity, valid = keys @ keys.transpose(-1, -2), torch.ones(4, 10, dtype=torch.bool)
    for slots in (4, 9, 20, 40):
        seeds = fitted_clusters(similarity, valid, slots)
        counts = (seeds == torch.arange(10)).sum(dim=(1, 2))
        assert (counts <= slots).all()
        assert (counts >= 0.7 * slots).all()


def literal_cores(keys, values, chunks, slots):
    """Cores of one KV head, by the same clusters: (mean key, mean value, size) in text order of their seeds."""
    counts = torch.bincount(chunks)
    padded = torch.zeros(1, len(counts), int(counts.max()), keys.shape[-1])
    for chunk in range(len(counts)):
        padded[0, chunk, : counts[chunk]] = F.normalize(keys[chunks == chunk], dim=-1)
    valid = torch.arange(int(counts.max())) < counts[:, None]
    seeds = fitted_clusters(padded @ padded.transpose(-1, -2), valid, slots)[0]
    cores, start = [], 0
    for chunk, count in enumerate(counts.tolist()):
        for seed in range(count):
            members = [start + t for t in range(count) if seeds[chunk, t] == seed]
            if members:
                cores.append((keys[members].mean(0), values[members].mean(0), len(members)))
        start += count
    return cores


def test_cores_are_means_and_know_their_size():
    row, chunks = make_row(30, 2), torch.tensor([0] * 9 + [1] * 14 + [2] * 7)
    entries = merge_chunks(row.keys, row.values, chunks, 12)
    for head in range(NUM_KV_HEADS):
        cores = literal_cores(row.keys[head], row.values[head], chunks, 12)
        assert sum(size for _, _, size in cores) == 30
        for index, (key, value, size) in enumerate(cores):
            torch.testing.assert_close(entries.keys[head, index], key)
            torch.testing.assert_close(entries.values[head, index], value)
            assert entries.side["log_size"][head, index] == pytest.approx(math.log(size))
        assert not entries.priority[head, len(cores) :].isfinite().any()
        live = [(cores[i][2], i) for i in range(len(cores))]
        order = entries.priority[head, : len(cores)].argsort().tolist()
        assert [live[i] for i in order] == sorted(live)  # small cores are given up first, of equal ones the older


def built(budget, length, **options):
    row = make_row(length + 4, 3)
    (layer,) = make_layers("semanticache", budget, scope="layer", delimiter_ids=(9,), **options)
    layer.text.token_ids = torch.randint(0, 10, (1, length), generator=torch.Generator().manual_seed(5))
    layer.build(prompt_of([row], [length]))
    layer._length = length
    return layer, row


def test_attention_counts_a_core_as_often_as_it_has_tokens():
    layer, row = built(0.4, 60, num_sinks=2, window=8)
    new = slice(60, 61)
    sizes = layer.side["log_size"][0].exp()
    live, keys, values = layer.priority[0].isfinite(), layer.keys[0].clone(), layer.values[0].clone()
    output = layer.attend(row.queries[None, :, new], row.keys[None, :, new], row.values[None, :, new], SCALE, 61)
    assert layer.keys[0, 0, -1].shape == (HEAD_DIM,)
    for query in range(NUM_HEADS):
        head, weights = query // GROUP, []
        entries = [i for i in range(keys.shape[1]) if live[head, i]]
        for index in entries:
            logit = float(row.queries[query, 60] @ keys[head, index]) * SCALE
            weights.append(float(sizes[head, index]) * math.exp(logit))
        weights.append(math.exp(float(row.queries[query, 60] @ row.keys[head, 60]) * SCALE))
        vectors = [*(values[head, index] for index in entries), row.values[head, 60]]
        expected = sum(w * v for w, v in zip(weights, vectors, strict=True)) / sum(weights)
        torch.testing.assert_close(output[0, query, 0], expected, atol=1e-4, rtol=1e-4)


def test_every_token_is_behind_one_entry():
    layer, row = built(0.3, 80, num_sinks=2, window=6)
    sizes = (layer.side["log_size"][0].exp() * layer.priority[0].isfinite()).sum(-1)
    torch.testing.assert_close(sizes, torch.full((NUM_KV_HEADS,), 80.0))
    assert torch.equal(layer.keys[0][:, -6:], row.keys[:, 74:80])  # the window stays exact
    assert layer.text.token_ids is None


def test_delimiters_come_from_the_tokenizer(tmp_path):
    model, _ = build_tiny(hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)
    ids = delimiter_token_ids(model, CLAUSE_END)
    assert sorted(tokenizer.decode([i]) for i in ids) == sorted("\n!,.:;?")
    text = tokenizer("One, two. Three\n\nfour", return_tensors="pt").input_ids[0]
    numbers = chunk_ids(text, ids, 64)
    pieces = [tokenizer.decode(text[numbers == i]) for i in range(int(numbers.max()) + 1)]
    assert pieces == ["One,", " two.", " Three\n\n", "four"]
    assert torch.bincount(chunk_ids(text, (), 5)).tolist() == [5, 5, 5, 5, 1]
    cache = build_method("semanticache").new_cache(model, 0.5)
    assert cache.layers[0].options.delimiter_ids == ids
    assert copy.deepcopy(cache).layers[0].text is not cache.layers[0].text


def test_embeddings_are_refused_by_name():
    model, _ = build_tiny(hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    cache = build_method("semanticache").new_cache(model, 0.5)
    with pytest.raises(NotImplementedError, match=r"semanticache.*input_ids"):
        model(inputs_embeds=torch.zeros(1, 5, 32), cache=cache)


@pytest.mark.parametrize(("option", "value"), [("max_chunk", 0), ("num_sinks", -1), ("window", 0)])
def test_bad_options_name_the_value(option, value):
    with pytest.raises(ValueError, match=f"{option}.*{value}"):
        build_method("semanticache", **{option: value})

"""RetroInfer against a literal reading of section 4.2 of https://arxiv.org/abs/2505.02922."""

import math

import pytest
import torch
from retrieval_cases import (
    GROUP,
    NUM_KV_HEADS,
    SCALE,
    build_layers,
    exact_entries,
    feed,
    literal_attention,
    make_case,
)

from kvcore.baselines.clustering import spherical_kmeans
from kvcore.method import build_method


def literal_kmeans(keys, clusters, iterations):
    """Labels of [m, d] keys, one token and one cluster at a time."""
    points = (keys - keys.mean(0)).double()
    directions = [points[i * len(keys) // clusters] / points[i * len(keys) // clusters].norm() for i in range(clusters)]
    labels = []
    for _ in range(iterations):
        labels = [max(range(clusters), key=lambda c, p=p: float(p @ directions[c])) for p in points]
        for cluster in range(clusters):
            members = [p for p, label in zip(points, labels, strict=True) if label == cluster]
            if members:
                total = torch.stack(members).sum(0)
                directions[cluster] = total / total.norm()
    return labels


def literal_clusters(case, head, first, stop, size, iterations):
    labels = literal_kmeans(case.keys[head, first:stop], (stop - first) // size, iterations)
    groups = [[first + i for i, label in enumerate(labels) if label == c] for c in range(max(labels) + 1)]
    return [group for group in groups if group]


def literal_step(case, token, split, clusters, estimated_share, count):
    """Output of one query over steady, retrieval and estimation zone; equations 2-4 with the softmax written out."""
    window = list(range(token + 1 - split.window, token + 1)) if isinstance(split.window, int) else split.window
    entries = []
    for head in range(NUM_KV_HEADS):
        centroids = [case.keys[head, group].mean(0) for group in clusters[head]]
        weights = [0.0] * len(centroids)
        for query in case.queries[head * GROUP : (head + 1) * GROUP, token]:
            masses = [math.exp(float(query @ centroid) * SCALE) for centroid in centroids]
            weights = [w + m / sum(masses) / GROUP for w, m in zip(weights, masses, strict=True)]
        order = sorted(range(len(centroids)), key=lambda c, weights=weights: -weights[c])
        fetched, tokens, rank = [], 0, 0
        while rank < len(order) and tokens + len(clusters[head][order[rank]]) <= count:
            tokens += len(clusters[head][order[rank]])
            fetched += clusters[head][order[rank]]
            rank += 1
        estimated = order[rank : rank + math.ceil(estimated_share * len(order))]
        tail = [
            (centroids[c], case.values[head, clusters[head][c]].mean(0), float(len(clusters[head][c])))
            for c in estimated
        ]
        entries.append(exact_entries(case, head, [*range(split.sinks), *fetched, *window]) + tail)
    return literal_attention(case, token, entries)


def test_clusters_equal_a_literal_spherical_kmeans():
    case = make_case(prompt=60, steps=0)
    labels = spherical_kmeans(case.keys, 6, iterations=5)
    for head in range(NUM_KV_HEADS):
        assert labels[head].tolist() == literal_kmeans(case.keys[head], 6, 5)


@pytest.mark.parametrize("estimated", [0.0, 0.4, 1.0])
def test_outputs_equal_the_paper_formula(estimated):
    case = make_case(prompt=140, steps=1)
    layer = build_layers("retroinfer", 0.4, [case], cluster_tokens=8, estimated=estimated, iterations=5)
    size = int(layer.unit_tokens[0])
    before = layer.planner.split(case.prompt, size)
    first, stop = before.sinks, case.prompt - before.window
    clusters = [literal_clusters(case, head, first, stop, size, 5) for head in range(NUM_KV_HEADS)]
    output = feed(layer, [case], 0)[0, :, 0]
    # the full window spilled half of itself, clustered by itself
    kept = int(layer.resident.counts[0])
    spilled = range(stop, case.prompt + 1 - kept)
    assert len(spilled) >= size
    for head in range(NUM_KV_HEADS):
        clusters[head] += literal_clusters(case, head, spilled.start, spilled.stop, size, 5)
    after = layer.planner.split(case.prompt + 1, size)
    split = type(after)(after.sinks, kept, after.fetched)
    expected = literal_step(case, case.prompt, split, clusters, estimated, after.fetched)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


def test_segments_are_clustered_apart():
    case = make_case(prompt=200, steps=0)
    layer = build_layers("retroinfer", 0.3, [case], cluster_tokens=8, segment_tokens=50)
    sizes = layer.sizes[0]
    segments = -(-int(layer.host.counts[0]) // 50)
    per_segment = sizes.shape[1] // segments
    bound = int(layer.host.counts[0]) // segments
    for head in range(NUM_KV_HEADS):
        start = int(sizes[head, :per_segment].sum())
        assert abs(start - bound) <= 1


def test_window_shorter_than_two_clusters_fills_the_newest_one():
    case = make_case(prompt=300, steps=40)
    layer = build_layers("retroinfer", 0.05, [case])
    for offset in range(40):
        feed(layer, [case], offset)
    means = layer.summaries["centroid"][0]
    starts = layer.sizes[0].cumsum(-1) - layer.sizes[0]
    for head in range(NUM_KV_HEADS):
        assert int(layer.sizes[0, head].sum()) == int(layer.host.counts[0])
        last = int(layer.unit_counts[0]) - 1
        members = layer.host.keys[0, head, starts[head, last] : starts[head, last] + layer.sizes[0, head, last]]
        torch.testing.assert_close(means[head, last], members.mean(0), atol=1e-5, rtol=1e-5)


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="iterations must be >= 1; received 0"):
        build_method("retroinfer", iterations=0)

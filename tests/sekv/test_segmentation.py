"""Segmentation: every token is exactly one of sink, anchor, span, window; thresholds, merging and splitting."""

import pytest
import torch

from sekv.segmentation import Kind, SegmentOptions, segment
from sekv.surprisal import SurprisalMeter

MODES = ("budget", "paper", "fixed")


def surprisals():
    generator = torch.Generator().manual_seed(0)
    table = torch.ones(257)
    table[::8] = 6.0
    return {
        "text": torch.rand(500, generator=generator) * 6,
        "peaks": table,
        "all_anchor": torch.arange(64) % 2 * 9.0,  # every second token far above the rest
        "no_anchor": torch.full((300,), 2.0),
        "short": torch.tensor([0.0, 3.0, 1.0]),
        "one": torch.zeros(1),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("text", surprisals())
@pytest.mark.parametrize("window", [1, 32])
def test_every_token_is_exactly_one_thing(mode, text, window):
    values = surprisals()[text]
    result = segment(values, window, SegmentOptions(mode=mode))
    counts = [result.where(kind).numel() for kind in Kind]
    assert sum(counts) == len(values)
    in_span = result.span_of_token >= 0
    assert torch.equal(in_span, result.kinds == int(Kind.SPAN))
    assert torch.equal(result.span_of_token[in_span].unique(), torch.arange(result.num_spans))
    assert int(result.lengths.sum()) == int(in_span.sum())
    ordered = result.span_of_token[in_span]
    assert torch.equal(ordered, ordered.sort().values)  # spans are numbered in text order
    assert result.where(Kind.SINK).tolist() == list(range(min(4, max(len(values) - window, 0))))


def test_paper_mode_keeps_short_runs_in_full_and_marks_what_is_surprising():
    values = torch.ones(100)
    values[[40, 50]] = 50.0
    result = segment(values, 10, SegmentOptions(mode="paper", num_sinks=0))
    assert result.where(Kind.ANCHOR).tolist() == list(range(40, 51))  # 41..49 is a run shorter than 16
    assert result.lengths.tolist() == [40, 39]


def test_budget_mode_respects_lengths():
    options = SegmentOptions(min_span=16, max_span=64, span_tokens=32)
    result = segment(surprisals()["text"], 32, options)
    assert int(result.lengths.min()) >= 8  # halves of a run just above max_span may be half as long
    assert int(result.lengths.max()) <= 64
    assert result.where(Kind.ANCHOR).numel() == 1


def test_switches():
    values = surprisals()["text"]
    assert segment(values, 32, SegmentOptions(anchors=False)).where(Kind.ANCHOR).numel() == 0
    fixed = segment(values, 32, SegmentOptions(mode="fixed", span_tokens=20))
    assert set(fixed.lengths.tolist()[:-1]) == {20}
    with pytest.raises(ValueError, match="segmentation must be one of budget, paper, fixed; received 'papr'"):
        SegmentOptions(mode="papr")
    with pytest.raises(ValueError, match="min_span <= max_span"):
        SegmentOptions(min_span=80)


@pytest.mark.parametrize("chunks", [[12], [5, 7], [1, 1, 10]])
def test_surprisal_of_chunks_equals_log_softmax_of_everything(chunks):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=False)
    hidden, ids = torch.randn(2, 12, 8), torch.randint(0, 50, (2, 12))
    meter = SurprisalMeter()
    for part, tokens in zip(hidden.split(chunks, 1), ids.split(chunks, 1), strict=True):
        meter.add(head, tokens, part)
    values = meter.values([0, 3])
    expected = -head(hidden[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(values[0, 1:], expected[0])
    torch.testing.assert_close(values[1, 4:], expected[1, 3:])
    assert values[0, 0] == 0
    assert not values[1, :4].any()

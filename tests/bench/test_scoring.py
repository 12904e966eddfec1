"""Shared scorers against values of the official packages (fuzzywuzzy 0.18.0, rouge-score 0.1.2)."""

from __future__ import annotations

import difflib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.bench.scoring import (
    contained_share,
    contains_any,
    edit_similarity,
    first_line,
    normalize_answer,
    rouge_f,
    strip_thinking,
    token_f1,
    truncate_at,
)


@pytest.mark.parametrize(
    ("prediction", "reference", "difflib_value", "indel_value"),
    [
        # computed with fuzzywuzzy 0.18.0, without and with python-Levenshtein
        ("return self.head", "return self.head.next", 0.86, 0.86),
        ("    return x + 1", "    return x - 1", 0.94, 0.94),
        ("abcd", "bdca", 0.25, 0.50),
        ("qabxcd", "abycdf", 0.67, 0.67),
        ("tide", "diet", 0.25, 0.50),
        ("", "x", 0.0, 0.0),
        ("x", "", 0.0, 0.0),
        ("same", "same", 1.0, 1.0),
    ],
)
def test_edit_similarity_is_fuzzywuzzys_ratio(prediction, reference, difflib_value, indel_value):
    assert edit_similarity(prediction, reference) == difflib_value
    assert edit_similarity(prediction, reference, "indel") == indel_value


@given(st.text("abc ", min_size=1, max_size=30), st.text("abc ", min_size=1, max_size=30))
def test_edit_similarity_by_definition(a, b):
    assert edit_similarity(a, b) == round(100 * difflib.SequenceMatcher(None, a, b).ratio()) / 100
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    assert edit_similarity(a, b, "indel") == round(100 * 2 * table[-1][-1] / (len(a) + len(b))) / 100


def test_edit_similarity_of_long_texts_keeps_the_junk_rule():
    # difflib ignores characters that fill more than 1% of texts over 200 characters, and so does fuzzywuzzy
    rng = random.Random(0)
    a = "".join(rng.choices("ab", k=400))
    assert edit_similarity(a, a[::-1]) < edit_similarity(a, a[::-1], "indel")


def test_normal_form_and_token_f1():
    assert normalize_answer("The  cat, sat on a mat!") == "cat sat on mat"
    assert token_f1("the cat sat", "A cat!") == pytest.approx(2 / 3)
    assert token_f1("cat cat", "cat") == pytest.approx(2 / 3)
    assert token_f1("", "cat") == token_f1("cat", "") == token_f1("dog", "cat") == 0.0


def test_rouge_of_empty_and_full_stop_predictions_is_zero_and_counted():
    # G6: ['', '.', exact] -> 0, 0, 1
    reference = "Amanda baked cookies."
    assert [rouge_f(p, reference) for p in ("", ".", reference)] == [0.0, 0.0, 1.0]
    assert rouge_f("police kill the gunman", "police killed the gunman") == pytest.approx(0.75)
    assert rouge_f("police kill the gunman", "police killed the gunman", stem=True) == pytest.approx(1.0)
    # a line is a sentence for rougeLsum
    assert rouge_f("b c\na", "a\nb c", "rougeLsum") == pytest.approx(1.0)
    assert rouge_f("b c\na", "a\nb c", "rougeL") == pytest.approx(2 / 3)


def test_containment():
    # G2
    assert contained_share("got 12", ["12", "34"]) == 0.5
    assert contains_any("got 12", ["12", "34"]) == 1.0
    assert contained_share("A B", ["a", "b"]) == 1.0
    assert contained_share("", ["12"]) == contains_any("", ["12"]) == 0.0


def test_cutting_answers():
    assert first_line("\n\nMusic\nQuestion: x") == "Music"
    assert first_line("") == ""
    assert truncate_at("5\n\nQuestion: 7", ["Question:", "\n\n"]) == "5"
    assert truncate_at("5", ["Question:"]) == "5"
    # G7
    assert strip_thinking("<think>12</think>\n34") == "\n34"
    assert strip_thinking("<think>never closed 12") == ""
    assert strip_thinking("opened by the template 12</think>\n34") == "\n34"

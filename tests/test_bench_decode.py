"""`scripts/bench_decode.py`: the full cache and every method in one process, one JSON line at the end."""

import json

import pytest
from script_cases import load_script


def test_ratios_are_of_the_same_run_and_the_last_line_is_json(capsys):
    arguments = ["--backbone", "tiny", "--dtype", "float32", "--context", "200", "--steps", "4"]
    assert load_script("bench_decode").main([*arguments, "--methods", "sekv", "full", "snapkv"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    full, *others = report["rows"]
    assert [row["method"] for row in report["rows"]] == ["full", "sekv", "snapkv"]
    assert full["decode_ratio_median"] == full["prefill_ratio"] == 1.0
    for row in others:
        assert row["prefill_ratio"] == pytest.approx(row["prefill_seconds"] / full["prefill_seconds"])
        assert row["decode_ratio_mean"] == pytest.approx(row["ms_per_token_mean"] / full["ms_per_token_mean"])
        assert row["device_share"] < 0.11


def test_an_unknown_method_is_named(capsys):
    assert load_script("bench_decode").main(["--backbone", "tiny", "--methods", "snapvk"]) == 2
    assert "snapkv" in capsys.readouterr().err


def test_a_budget_that_a_method_cannot_reach_is_named_and_left_out(capsys):
    arguments = ["--backbone", "tiny", "--dtype", "bfloat16", "--context", "200", "--steps", "2"]
    assert (
        load_script("bench_decode").main([*arguments, "--methods", "kivi", "snapkv", "--budgets", "0.05", "0.5"]) == 0
    )
    output = capsys.readouterr()
    rows = json.loads(output.out.splitlines()[-1])["rows"]
    assert [(row["method"], row["budget"]) for row in rows] == [
        *(("full", 1.0), ("kivi", 0.5), ("snapkv", 0.05), ("snapkv", 0.5)),
    ]
    assert "left out: method 'kivi' cannot meet budget=0.05" in output.err

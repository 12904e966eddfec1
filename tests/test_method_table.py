"""`scripts/method_table.py`: every method and budget on one line, from fidelity, needle and time files."""

import json

import pytest
from script_cases import load_script

SCRIPT = load_script("method_table")


def row(bench, label, budget, metrics, **more):
    ledger = {"device_share": 0.1, "device_bytes": 2e6, "host_bytes": 4e6, "attended_share": 0.25}
    common = {"reference_only": False, "h2d_bytes_per_token": 3e6, **ledger}
    return {"bench": bench, "label": label, "budget": budget, "metrics": metrics, **common, **more}


def test_a_line_holds_means_counts_and_ratios():
    rows = [
        row("fidelity", "sekv", 0.1, {"kl": 0.1, "agreement": 0.8}),
        row("fidelity", "sekv", 0.1, {"kl": 0.3, "agreement": 0.9}),
        row("fidelity", "oracle_topk", 0.1, {"kl": 0.0, "agreement": 1.0}, reference_only=True),
        *(row("niah", "sekv", 0.1, {"recall": recall}) for recall in (1.0, 0.0, 1.0)),
        row("niah", "sekv", 0.2, {"recall": 1.0}),
    ]
    times = [
        {"method": "sekv", "budget": 0.1, "prefill_ratio": 1.2, "decode_ratio_median": 1.25},
        {"method": "sekv", "budget": 0.2, "prefill_ratio": 9.0, "decode_ratio_median": 9.0},
    ]
    table = SCRIPT.method_table(rows, times)
    assert table.rows == [
        ["sekv", "0.1", "0.2000", "0.850", "2 of 3", "0.100", "2.0", "4.0", "0.25", "3.00", "1.20x", "1.25x"],
        ["oracle_topk (reference)", "0.1", "0.0000", "1.000", "-", "0.100", "2.0", "4.0", "0.25", "3.00", "-", "-"],
    ]
    assert "1 or 2 windows" in table.note
    assert len(SCRIPT.method_table(rows).columns) == len(table.columns) - 2


def test_files_are_read_and_a_wrong_one_is_named(tmp_path, capsys):
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"samples": [row("fidelity", "full", 1.0, {"kl": 0.0, "agreement": 1.0})]}))
    assert SCRIPT.main([str(results)]) == 0
    assert "| full | 1 | 0.0000 |" in capsys.readouterr().out
    assert SCRIPT.main([str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err
    with pytest.raises(ValueError, match="bench=fidelity"):
        SCRIPT.method_table([row("niah", "full", 1.0, {"recall": 1.0})])

"""Whatever is read: finite numbers from odd prompts, and files that are not UTF-8 are named."""

from __future__ import annotations

import gzip
import itertools

import pytest
import torch
from contract_cases import fed, generate, prefilled
from input_cases import PROMPTS, ids_of, texts, tiny

import freqdepth
import kvcore.baselines
import sekv
from kvcore.attention import prefill
from kvcore.bench.sources import read_records
from kvcore.method import build_method, method_names
from kvcore.text import load_documents
from kvcore.tiny import byte_tokenizer
from sekv.documents import DataError, LocalDocuments

REGISTERED = (kvcore.baselines, sekv, freqdepth)
METHODS = method_names()
TRIED = "fuzzed prompts"


@pytest.mark.parametrize("name", METHODS)
def test_odd_prompts_give_finite_outputs(name, tally):
    with torch.inference_mode():
        for prompt, dtype in itertools.product(PROMPTS, (torch.float32, torch.bfloat16)):
            if prompt == "whitespace" and dtype == torch.bfloat16:
                continue
            tally(TRIED)
            ids = ids_of(prompt)
            cache, logits = prefilled(tiny(dtype), name, ids, budgets=(0.25, 0.5, 0.85, 1.0))
            assert logits.isfinite().all(), prompt
            assert fed(tiny(dtype), cache, ids[:, -2:]).isfinite().all(), prompt
            assert fed(tiny(dtype), cache, torch.tensor([[0, 1, 2, 2]]), step=4).isfinite().all(), prompt


@pytest.mark.parametrize("name", METHODS)
def test_an_empty_prompt_is_refused_with_a_clear_message(name, tally):
    tally(TRIED)
    empty, model = torch.zeros(1, 0, dtype=torch.long), tiny()
    with pytest.raises(ValueError, match="the prompt must hold at least one token; received 0"):
        prefill(model, build_method(name).new_cache(model, 1.0), empty)
    cache = build_method(name).new_cache(model, 1.0)
    message = "token"
    try:
        # transformers begins with the first special token where the tokenizer has one: never an answer to nothing
        assert generate(model, empty, cache, max_new_tokens=2, bos_token_id=1).shape[1] >= 2
    except ValueError as error:
        message = str(error)
    assert "token" in message or "input_ids" in message


def test_every_text_survives_the_tokenizer():
    tokenizer = byte_tokenizer()
    for name, text in texts().items():
        assert tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False) == text, name


# --- data files that are not UTF-8
BROKEN = b'{"text": "good", "meta": {}}\n{"text": "bad \xff\xfe\x80 bytes", "meta": {}}\n'


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.jsonl.gz"])
def test_benchmark_files_that_are_not_utf8_are_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(BROKEN) if name.endswith("gz") else BROKEN)
    with pytest.raises(ValueError, match=rf"{path}.*(utf-8|UTF-8|JSON)"):
        read_records(path)


def test_documents_that_are_not_utf8_are_named_or_read_with_replacements(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(BROKEN)
    with pytest.raises(ValueError, match=str(tmp_path / "data.jsonl")):
        load_documents(str(tmp_path / "data.jsonl"))
    (tmp_path / "plain.txt").write_bytes(b"bad \xff bytes")
    assert load_documents(str(tmp_path / "plain.txt"))[0].text == "bad \ufffd bytes"


def test_training_documents_that_are_not_utf8_are_named_or_read_with_replacements(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(BROKEN)
    with pytest.raises(DataError, match=r"data\.jsonl: the line at byte 29 is not JSON .*utf-8"):
        list(itertools.islice(LocalDocuments(str(tmp_path / "data.jsonl")).stream(0), 4))
    (tmp_path / "plain.txt").write_bytes(b"bad \xff bytes")
    document = next(LocalDocuments(str(tmp_path / "plain.txt")).stream(0))
    assert document.text == "bad \ufffd bytes"

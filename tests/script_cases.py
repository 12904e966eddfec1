"""Programs of scripts/ as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load_script(name: str) -> ModuleType:
    """scripts/NAME.py, under a name that hides no module of ours."""
    alias = f"script_{name}"
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(alias, SCRIPTS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[alias] = module  # dataclasses ask for their module
        spec.loader.exec_module(module)
    return sys.modules[alias]

"""No pickle is loaded, no code of others is run, archives stay in their folder."""

from __future__ import annotations

import ast
import importlib.util
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvcore.backbone import BackboneConfig

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    [path for package in ("kvcore", "sekv", "freqdepth", "scripts") for path in (ROOT / package).rglob("*.py")]
    + [ROOT / "train.py", ROOT / "evaluate.py"]
)
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_and_no_remote_code_is_trusted(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & UNPICKLERS
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in UNPICKLERS
            if node.module == "torch":
                assert not {"load", "save"} & {alias.name for alias in node.names}
        elif isinstance(node, ast.Call):
            name = called(node)
            assert name not in ("torch.load", "torch.save", "np.load", "numpy.load"), node.lineno
            assert not name.endswith((".extractall", "yaml.load", "yaml.unsafe_load")), node.lineno
            for keyword in node.keywords:
                trusted = keyword.arg in ("trust_remote_code", "allow_pickle")
                assert not (trusted and isinstance(keyword.value, ast.Constant) and keyword.value.value), node.lineno


def test_remote_code_is_off_unless_asked_for():
    assert BackboneConfig(name="x", path="tiny").trust_remote_code is False


def test_every_checkpoint_in_the_repository_is_safetensors():
    kinds = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npy", ".npz")
    packages = [path for name in ("kvcore", "sekv", "freqdepth", "conf") for path in (ROOT / name).rglob("*")]
    assert not [path for path in packages if path.suffix in kinds]


@pytest.fixture(scope="module")
def fetch():
    spec = importlib.util.spec_from_file_location("fetch_data", ROOT / "scripts" / "fetch_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def zipped(path: Path, members: dict[str, bytes], mode: int = 0o100644) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return path


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "a\\..\\evil", "..", "./../evil"])
def test_members_outside_the_folder_are_refused(fetch, tmp_path, name):
    folder = tmp_path / "data"
    folder.mkdir()
    archive = zipped(folder / "data.zip", {"good": b"x", name: b"evil"})
    with pytest.raises(fetch.FetchError, match="outside the folder"):
        fetch.unpack(archive, folder, "*")
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "data.zip"]


def test_links_are_refused(fetch, tmp_path):
    archive = zipped(tmp_path / "data.zip", {"link": b"/etc/passwd"}, mode=0o120777)
    with pytest.raises(fetch.FetchError, match="outside the folder"):
        fetch.unpack(archive, tmp_path, "*")


def test_a_bomb_is_refused_before_anything_of_it_is_read(fetch, tmp_path, monkeypatch):
    """The limit counts every member, also those that the pattern leaves out: checking them reads them."""
    archive = zipped(tmp_path / "data.zip", {"good.jsonl": b"{}", "bomb": bytes(1 << 20)})
    monkeypatch.setattr(fetch, "LARGEST_ARCHIVE", 1000)
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: pytest.fail("the bomb was read"))
    with pytest.raises(fetch.FetchError, match="more than the 1000 allowed"):
        fetch.unpack(archive, tmp_path, "*.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["data.zip"]


def test_a_size_that_lies_is_found_out(fetch, tmp_path):
    data = zipped(tmp_path / "data.zip", {"a.jsonl": bytes(5000)}).read_bytes()
    true, lie = (5000).to_bytes(4, "little"), (10).to_bytes(4, "little")
    assert true in data
    (tmp_path / "data.zip").write_bytes(data.replace(true, lie))
    with pytest.raises(fetch.FetchError, match=r"broken|no zip archive"):
        fetch.unpack(tmp_path / "data.zip", tmp_path, "*")
    assert not (tmp_path / "a.jsonl").exists()


def test_a_tar_in_the_place_of_a_zip_is_refused(fetch, tmp_path):
    with tarfile.open(tmp_path / "data.zip", "w:gz") as archive:
        info = tarfile.TarInfo("../evil")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"evil"))
    with pytest.raises(fetch.FetchError, match="no zip archive"):
        fetch.unpack(tmp_path / "data.zip", tmp_path, "*")
    assert [path.name for path in tmp_path.iterdir()] == ["data.zip"]

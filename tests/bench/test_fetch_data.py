"""`scripts/fetch_data.py` against a local server: resume, checksums, archives, licences, no network."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_data.py"
CONTENT = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def fetch():
    spec = importlib.util.spec_from_file_location("fetch_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server(tmp_path):
    """A server of `tmp_path/www` that continues downloads; `requests` lists (path, range)."""
    root = tmp_path / "www"
    root.mkdir()
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = root / self.path[1:]
            wanted = self.headers.get("Range")
            requests.append((self.path, wanted))
            if not path.is_file():
                self.send_error(404)
                return
            data, start = path.read_bytes(), int(wanted[6:-1]) if wanted else 0
            if start >= len(data):
                self.send_error(416)
                return
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(len(data) - start))
            if path.name.startswith("stated"):
                self.send_header("X-Linked-Etag", f'"{hashlib.sha256(CONTENT).hexdigest()}"')
            self.end_headers()
            self.wfile.write(data[start:])

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    http.root, http.requests, http.url = root, requests, f"http://127.0.0.1:{http.server_port}"
    yield http
    http.shutdown()
    http.server_close()


def get(fetch, server, tmp_path, name, sha256=None):
    return fetch.fetch_file(f"{server.url}/{name}", tmp_path / name, sha256, tmp_path / "checksums.json")


def test_download_is_kept_and_not_repeated(fetch, server, tmp_path):
    (server.root / "a").write_bytes(CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert get(fetch, server, tmp_path, "a") == digest
    assert get(fetch, server, tmp_path, "a", digest) == digest
    assert len(server.requests) == 1
    assert json.loads((tmp_path / "checksums.json").read_text()) == {"a": digest}


@pytest.mark.parametrize("have", [1, 4000, len(CONTENT)])
def test_an_interrupted_download_continues(fetch, server, tmp_path, have):
    (server.root / "a").write_bytes(CONTENT)
    (tmp_path / "a.part").write_bytes(CONTENT[:have])
    get(fetch, server, tmp_path, "a", hashlib.sha256(CONTENT).hexdigest())
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert server.requests == [("/a", f"bytes={have}-")]
    assert not (tmp_path / "a.part").exists()


@pytest.mark.parametrize(("name", "sha256"), [("a", "0" * 64), ("stated", None)])
def test_a_wrong_checksum_leaves_nothing_behind(fetch, server, tmp_path, name, sha256):
    (server.root / name).write_bytes(b"something else")
    with pytest.raises(fetch.FetchError, match="expected"):
        get(fetch, server, tmp_path, name, sha256)
    assert not (tmp_path / name).exists()
    assert not (tmp_path / f"{name}.part").exists()


def test_a_file_changed_on_disk_is_fetched_anew(fetch, server, tmp_path):
    (server.root / "a").write_bytes(CONTENT)
    get(fetch, server, tmp_path, "a")
    (tmp_path / "a").write_bytes(b"half")
    get(fetch, server, tmp_path, "a")
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_missing_files_and_no_network_are_named(fetch, server, tmp_path):
    with pytest.raises(fetch.FetchError, match="answered 404"):
        get(fetch, server, tmp_path, "nothing")
    with pytest.raises(fetch.FetchError, match="out of reach"):
        fetch.fetch_file("http://127.0.0.1:9/a", tmp_path / "a", None, tmp_path / "c.json")


def _zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def test_archives_are_unpacked_flat(fetch, tmp_path):
    archive = _zip(tmp_path / "data.zip", {"data/qasper.jsonl": "{}\n", "data/x.py": "no", "other.jsonl": "no"})
    assert fetch.unpack(archive, tmp_path, "data/*.jsonl") == ["data/qasper.jsonl"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.zip", "qasper.jsonl"]


@pytest.mark.parametrize("name", ["data/../../evil.jsonl", "/data/evil.jsonl"])
def test_paths_that_leave_the_folder_are_refused(fetch, tmp_path, name):
    archive = _zip(tmp_path / "data.zip", {name: "x", "data/good.jsonl": "x"})
    with pytest.raises(fetch.FetchError, match="outside the folder"):
        fetch.unpack(archive, tmp_path, "*.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["data.zip"]


def test_broken_huge_and_empty_archives_are_refused(fetch, tmp_path, monkeypatch):
    (tmp_path / "bad.zip").write_bytes(b"PK no zip")
    with pytest.raises(fetch.FetchError, match="no zip archive"):
        fetch.unpack(tmp_path / "bad.zip", tmp_path, "*")
    archive = _zip(tmp_path / "data.zip", {"data/a.jsonl": "x" * 100})
    with pytest.raises(fetch.FetchError, match="none of the files"):
        fetch.unpack(archive, tmp_path, "nothing/*")
    monkeypatch.setattr(fetch, "LARGEST_ARCHIVE", 50)
    with pytest.raises(fetch.FetchError, match="more than the 50 allowed"):
        fetch.unpack(archive, tmp_path, "data/*")


def test_licences_are_listed_and_unknown_sets_refused(fetch, capsys):
    assert fetch.main(["--list"]) == 0
    listed = capsys.readouterr().out
    for name in ("gsm8k", "humaneval", "longbench", "infinitebench", "samsum", "ruler"):
        assert f"{name}: licence " in listed
    with pytest.raises(SystemExit) as error:
        fetch.main(["gsm9k"])
    assert error.value.code == 2
    assert "valid: gsm8k" in capsys.readouterr().err


def test_what_fails_is_named_and_the_exit_code_says_so(fetch, server, tmp_path, monkeypatch, capsys):
    (server.root / "a").write_bytes(CONTENT)
    table = tmp_path / "sources.json"
    files = [{"name": "a", "url": f"{server.url}/a"}]
    broken = [{"name": "b", "url": f"{server.url}/b"}]
    table.write_text(json.dumps({"good": {"licence": "MIT", "files": files}, "bad": {"licence": "X", "files": broken}}))
    monkeypatch.setattr(fetch, "SOURCES", table)
    assert fetch.main(["--target", str(tmp_path / "out")]) == 1
    assert (tmp_path / "out" / "good" / "a").read_bytes() == CONTENT
    assert "not complete: bad" in capsys.readouterr().err

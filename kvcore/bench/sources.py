"""Where benchmark records come from: `data_dir`, the folder that `scripts/fetch_data.py` fills, or the hub.

Records are plain dicts in the schema of the official data set. Local files: `.jsonl`, `.jsonl.gz`, `.json` (a list)
and `.parquet`. No dataset script is ever run.
"""

from __future__ import annotations

import glob
import gzip
import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.backbone import cache_root
from kvcore.log import get_logger

log = get_logger(__name__)
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """One set of records on the hub.

    Attributes:
        repo: dataset id.
        licence: as stated by the data set's authors.
        file: path inside the repository (of the zip archive when `member` is given); None lets `datasets` find the
            files of `split`, in `data_dir`.
        member: path inside the archive.
        data_dir: folder inside the repository.
        split: split, where no file is named.
        revision: commit; None takes the newest, and the log says which one that was.
    """

    repo: str
    licence: str
    file: str | None = None
    member: str | None = None
    data_dir: str | None = None
    split: str = "test"
    revision: str | None = None


def load_records(
    bench: str, names: Sequence[str], data_dir: str | None, hub: HubSource | None, layout: str
) -> list[dict[str, Any]]:
    """Records of the first of `names` that exists, in file order.

    Args:
        bench: benchmark, the name of its folder below the data cache.
        names: file names without suffix that hold the records, best first (`passkey`, `passkey_8192`).
        data_dir: a file, a folder or a glob; None tries the data cache, then the hub.
        hub: where to download from when nothing local is given.
        layout: the layout expected, for messages.

    Raises:
        FileNotFoundError: nothing found (names the path and the layout expected), or the hub out of reach.
        ValueError: a file that cannot be read as records.
    """
    found = find_file(data_dir or str(data_cache(bench)), names)
    if found is not None:
        return read_records(found)
    if data_dir is not None or hub is None:
        raise FileNotFoundError(missing_message(bench, names, data_dir, layout))
    return read_hub(bench, hub, missing_message(bench, names, data_dir, layout))


def missing_message(bench: str, names: Sequence[str], data_dir: str | None, layout: str) -> str:
    """What was looked for, where, and how the files must lie."""
    where = f"data_dir={data_dir!r}" if data_dir is not None else f"{data_cache(bench)} (the data cache)"
    wanted = " or ".join(f"{name}{{{','.join(SUFFIXES)}}}" for name in names)
    return (
        f"bench '{bench}': no {wanted} at {where}. Layout expected: {layout}. "
        f"`python scripts/fetch_data.py {bench}` downloads it where there is a network; or give data_dir="
    )


def data_cache(bench: str) -> Path:
    """Folder that `scripts/fetch_data.py` fills for a benchmark."""
    return cache_root() / "data" / bench


def find_file(data_dir: str, names: Sequence[str]) -> Path | None:
    """The file of the first name that exists at a file, folder (or one level down) or glob; None without one."""
    files = local_files(data_dir)
    for name in names:
        for path in files:
            stem = next((path.name[: -len(s)] for s in SUFFIXES if path.name.endswith(s)), path.name)
            # `TASK.jsonl`, `TASK/validation.jsonl` (RULER), `TASK/test-00000-of-00001.parquet` (hub snapshots)
            if name == stem or (path.parent.name == name and stem.split("-")[0] in ("validation", "test", "train")):
                return path
    # one file was named and only one set is wanted: it is that one, whatever it is called
    if len(names) == 1 and len(files) == 1 and Path(data_dir).expanduser().is_file():
        return files[0]
    return None


def local_files(data_dir: str) -> list[Path]:
    """Readable files at a path, sorted: the file, a folder's files (two levels), or a glob's matches."""
    path = Path(data_dir).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        candidates: Iterable[Path] = (p for depth in ("*", "*/*") for p in path.glob(depth))
    else:
        candidates = map(Path, glob.glob(str(path), recursive=True))
    return sorted(p for p in candidates if p.is_file() and p.name.endswith(SUFFIXES))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every record of a local file.

    Raises:
        ValueError: not readable in the format its suffix says; names file and line.
    """
    try:
        if path.name.endswith(".parquet"):
            import pyarrow.parquet

            return list(pyarrow.parquet.read_table(path).to_pylist())
        data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        if path.name.endswith(".json"):
            return _as_list(json.loads(data), path)
    except (OSError, UnicodeDecodeError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as {path.suffix}: {error}") from error
    return parse_jsonl(data, str(path))


def parse_jsonl(data: bytes, where: str) -> list[dict[str, Any]]:
    """One JSON object a line; empty lines are skipped.

    Raises:
        ValueError: a line that is no JSON object; names file and line.
    """
    records = []
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{where} line {number} is not UTF-8 ({error.reason}); save the file as UTF-8") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} line {number} is not JSON ({error}); expected one object a line") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where} line {number} holds a {type(record).__name__}; expected one object a line")
            records.append(record)
    return records


def _as_list(value: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected a list of records")
    return value


def require_fields(records: Sequence[dict[str, Any]], fields: Sequence[str], where: str) -> None:
    """Check the schema before anything slow.

    Raises:
        ValueError: no records, or the first record that lacks a field.
    """
    if not records:
        raise ValueError(f"{where}: the file holds no records")
    for index, record in enumerate(records):
        lacking = [field for field in fields if field not in record]
        if lacking:
            raise ValueError(
                f"{where}: record {index} lacks {', '.join(map(repr, lacking))}; expected fields: {', '.join(fields)}; "
                f"received {', '.join(sorted(record))}"
            )


def read_hub(bench: str, hub: HubSource, missing: str) -> list[dict[str, Any]]:
    """Download (once, into the hub's own cache) and read.

    Raises:
        FileNotFoundError: the hub cannot be reached or refuses.
    """
    try:
        if hub.file is None:
            import datasets

            rows = datasets.load_dataset(hub.repo, data_dir=hub.data_dir, split=hub.split, revision=hub.revision)
            return [dict(row) for row in rows]
        from huggingface_hub import hf_hub_download

        local = Path(hf_hub_download(hub.repo, hub.file, repo_type="dataset", revision=hub.revision))
    # ValueError: the hub's client reports an offline cache miss so in some versions
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileNotFoundError(
            f"the hub did not give {hub.repo}/{hub.file or hub.split} ({reason}). {missing}"
        ) from error
    if hub.revision is None:
        log.info("bench '%s': %s is not pinned; this is %s", bench, hub.repo, local)
    if hub.member is None:
        return read_records(local)
    with zipfile.ZipFile(local) as archive:
        return parse_jsonl(archive.read(hub.member), f"{hub.repo}/{hub.file}:{hub.member}")

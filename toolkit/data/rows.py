"""Rows of local files, one at a time, with their place. Nothing heavy is imported."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from toolkit.data.files import suffix
from toolkit.errors import InputError, Place


@dataclass(frozen=True)
class Row:
    """One sample of a source, and its place: ``number`` counts lines or rows from 1."""

    value: dict[str, Any]
    file: str
    number: int
    unit: str = "line"

    def error(self, field: str | None, message: str) -> InputError:
        """An InputError at this row: ``file:line: field: message``, or ``file: row n: field: message``."""
        return _error_at(self.file, self.number, self.unit, field, message)


@dataclass(frozen=True)
class Fields:
    """Names of columns to read: ``needed``, and those that are read where a file has them."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.needed or name in self.optional


def read_rows(files: Iterable[Path], columns: Fields = Fields()) -> Iterator[Row]:
    """The rows of ``files``, in order.

    A line of JSONL (plain or gzip) is a row, an item of a JSON list, a row of Parquet; a TXT file is
    one row ``{"text": the whole file}``, so that a folder of TXT files is one sample a file. Of Parquet
    only ``columns`` are read where the file has all needed ones. Raises InputError with the line or row.
    """
    for file in files:
        try:
            yield from _READERS[suffix(file) or ""](file, columns)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError.at(Place(file), None, f"cannot be read: {reason}") from None


def row_count(files: Iterable[Path]) -> int | None:
    """The rows of plain JSONL and Parquet files, without reading values; None where others are among them, or one
    cannot be read. Empty lines count."""
    total = 0
    for file in files:
        try:
            if suffix(file) == ".jsonl":
                with file.open("rb") as stream:
                    total += sum(block.count(b"\n") for block in iter(partial(stream.read, 1 << 20), b""))
            elif suffix(file) == ".parquet":
                import pyarrow.parquet

                total += int(pyarrow.parquet.read_metadata(file).num_rows)
            else:
                return None
        except (OSError, ValueError):  # reading its rows says what is wrong
            return None
    return total


def left_out(files: Iterable[Path], columns: Fields) -> dict[str, int]:
    """Columns of Parquet files that ``read_rows`` leaves out, and in how many rows they have a value."""
    found: dict[str, int] = {}
    for file in files:
        if suffix(file) != ".parquet":
            continue
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                there = table.schema_arrow.names
                types = dict(zip(there, table.schema_arrow.types, strict=True))
                if not (columns.needed and set(columns.needed) <= set(there)):
                    continue
                for name in there:
                    if name in columns or pyarrow.types.is_null(types[name]):
                        continue
                    if rows := _values(table.metadata, name):
                        found[name] = found.get(name, 0) + rows
        except (OSError, pyarrow.ArrowException):
            continue  # reading its rows says what is wrong
    return found


def _values(about: Any, name: str) -> int:
    """Rows of a Parquet file that have a value of column ``name``: all, where the file does not say which are null."""
    rows = 0
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        parts = [group.column(at) for at in range(group.num_columns)]
        nulls = [
            part.statistics.null_count
            for part in parts
            if part.path_in_schema == name and part.statistics is not None and part.statistics.has_null_count
        ]
        rows += group.num_rows - (nulls[0] if nulls else 0)
    return rows


def _jsonl(file: Path, columns: Fields) -> Iterator[Row]:
    with _open(file) as stream:
        # Lines end at \n alone: JSON strings may hold the other line ends of Unicode.
        for number, raw in enumerate(stream, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw.strip():
                continue
            try:
                value = json.loads(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise _error_at(str(file), number, "line", None, f"not UTF-8 (byte {error.start})") from None
            except json.JSONDecodeError as error:
                message = f"not valid JSON: {error.msg} (column {error.colno})"
                raise _error_at(str(file), number, "line", None, message) from None
            except (ValueError, RecursionError) as error:
                raise _error_at(str(file), number, "line", None, f"not valid JSON: {error}") from None
            yield _row(value, str(file), number)


def _json(file: Path, columns: Fields) -> Iterator[Row]:
    text = _text(file)
    at = _skip(text, 0)
    if text[at : at + 1] == "{":
        # Many a file of JSON lines is called .json; one object alone is a file of one line.
        yield from _jsonl(file, columns)
        return
    if text[at : at + 1] != "[":
        raise _error_at(str(file), 1, "line", None, "a .json data file must be a list of objects")
    line = counted = 0
    decoder = json.JSONDecoder()
    at = _skip(text, at + 1)
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = decoder.raw_decode(text, at)
            yield _row(value, str(file), line + 1)
            at = _skip(text, end)
            if text[at : at + 1] == ",":
                at = _skip(text, at + 1)
            elif text[at : at + 1] != "]":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        except json.JSONDecodeError as error:
            message = f"not valid JSON: {error.msg} (column {error.colno})"
            raise _error_at(str(file), error.lineno, "line", None, message) from None
        except (ValueError, RecursionError) as error:
            raise _error_at(str(file), line + 1, "line", None, f"not valid JSON: {error}") from None
    rest = _skip(text, at + 1)
    if rest < len(text):
        line = text.count("\n", 0, rest) + 1
        raise _error_at(str(file), line, "line", None, "not valid JSON: text after the list")


def _parquet(file: Path, columns: Fields) -> Iterator[Row]:
    # Both take a tenth of a second to import, and only Parquet needs them.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            there = table.schema_arrow.names
            # Where one is missing all are read: the message about it names those that are there.
            complete = columns.needed and set(columns.needed) <= set(there)
            wanted = [name for name in there if name in columns] if complete else None
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=wanted):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(value, str(file), number, "row")
    except pyarrow.ArrowException as error:
        raise InputError.at(Place(file), None, f"not a readable Parquet file: {error}") from None


def _txt(file: Path, columns: Fields) -> Iterator[Row]:
    text = _text(file)
    if text.strip():
        yield Row({"text": text}, str(file), 1)


_READERS = {".jsonl": _jsonl, ".jsonl.gz": _jsonl, ".json": _json, ".parquet": _parquet, ".txt": _txt}


def _open(file: Path) -> gzip.GzipFile | BinaryIO:
    return gzip.open(file, "rb") if file.name.lower().endswith(".gz") else file.open("rb")


def _text(file: Path) -> str:
    raw = file.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _error_at(str(file), line, "line", None, f"not UTF-8 text (byte {error.start})") from None


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\n", "\r"):
        at += 1
    return at


def _row(value: Any, file: str, number: int) -> Row:
    if not isinstance(value, dict):
        raise _error_at(file, number, "line", None, f"a sample must be an object {{...}}, not a {_json_name(value)}")
    return Row(value, file, number)


def _json_name(value: Any) -> str:
    names = {list: "list", str: "string", bool: "true or false", int: "number", float: "number"}
    return names.get(type(value), "null")


def _error_at(file: str, number: int, unit: str, field: str | None, message: str) -> InputError:
    if unit == "line":
        return InputError.at(Place(file, number), field, message)
    key = f"{unit} {number}" + (f": {field}" if field else "")
    return InputError.at(Place(file), key, message)

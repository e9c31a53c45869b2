"""A log of requests: when they came, how long their prompts and answers were.

Decides which logs can be read and how a part of one is sent again, at its own rate or another.
Refuses to know files and servers; prompts are drawn, as logs of lengths have none. Pure.
"""

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from kvcourier.bench.plan import Burst, Planned, Prompts
from kvcourier.errors import ConfigError

T = TypeVar("T")

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 10_000_000
_EPOCH = datetime(1970, 1, 1)
# Azure's logs have seven digits after the point, datetime takes six.
_STAMP_LENGTH = len("2023-11-16 18:15:46.680590")


def _seconds(value: Any) -> float:
    return float(value)


def _milliseconds(value: Any) -> float:
    return float(value) / 1e3


def _stamp(value: Any) -> float:
    stamp = datetime.fromisoformat(str(value).strip()[:_STAMP_LENGTH].rstrip("Z"))
    return (stamp.replace(tzinfo=None) - _EPOCH).total_seconds()


@dataclass(frozen=True, slots=True)
class Format:
    """How one kind of log names its columns, and how its times are read as seconds."""

    name: str
    arrival: str
    input_tokens: str
    output_tokens: str
    read_time: Callable[[Any], float]

    @property
    def columns(self) -> tuple[str, str, str]:
        """The columns that it needs; more are passed over."""
        return self.arrival, self.input_tokens, self.output_tokens


FORMATS = (
    Format("kvcourier", "arrival_s", "input_tokens", "output_tokens", _seconds),
    Format("Mooncake", "timestamp", "input_length", "output_length", _milliseconds),
    Format("Azure LLM inference", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _stamp),
    Format("BurstGPT", "Timestamp", "Request tokens", "Response tokens", _seconds),
)
"""Logs that can be read, as CSV with a header or as one JSON object a line."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in the order in which they came; the first came at 0.

    Attributes:
        arrivals_s: seconds since the first; ascending.
        input_tokens: length of each prompt.
        output_tokens: length of each answer.
        num_unanswered: requests of the log that are left out, as they had no answer.
    """

    arrivals_s: tuple[float, ...]
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    num_unanswered: int = 0

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @property
    def qps(self) -> float:
        """Mean arrivals a second."""
        return (len(self) - 1) / self.arrivals_s[-1]

    @property
    def mean_input_tokens(self) -> int:
        """Of a prompt, rounded."""
        return round(statistics.fmean(self.input_tokens))

    def part(self, number: int, count: int, qps: float) -> tuple[range, tuple[float, ...]]:
        """The `number`-th part of `count` requests: which, and when, at a mean rate of `qps`.

        Parts follow each other through the log and begin anew behind its end. Gaps keep their
        proportions, so bursts stay bursts.
        """
        num_parts = max(1, len(self) // count)
        start = number % num_parts * count
        chosen = range(start, min(start + count, len(self)))
        first_s = self.arrivals_s[start]
        stretch = self.qps / qps
        return chosen, tuple((self.arrivals_s[index] - first_s) * stretch for index in chosen)

    def burst(
        self, prompts: Callable[[int], Prompts], number: int, count: int, qps: float
    ) -> Burst:
        """A part of the log as requests; `prompts` gives the source of prompts of a length."""
        chosen, arrivals_s = self.part(number, count, qps)
        return tuple(
            Planned(
                arrival_s,
                prompts(self.input_tokens[index]),
                f"{number} {index} {qps:g}",
                self.output_tokens[index],
            )
            for index, arrival_s in zip(chosen, arrivals_s, strict=True)
        )


def read_traffic(text: str, name: str) -> Traffic:
    """Read a log.

    Args:
        text: its content: CSV with a header, or one JSON object a line.
        name: of the file, for messages.

    Raises:
        ConfigError: the form is not known, a value cannot be read, or there are fewer than two
            requests or no time between them.
    """
    rows = _json_rows(text, name) if text.lstrip().startswith("{") else _csv_rows(text)
    kind: Format | None = None
    found: list[tuple[float, int, int]] = []
    for line, row in rows:
        kind = kind or _format_of(row, name)
        found.append(_request(kind, row, f"{name}, line {line}"))
        if len(found) > MAX_REQUESTS:
            raise ConfigError(f"{name}: expected at most {MAX_REQUESTS:,} requests, found more")
    # Some logs are written when requests end.
    answered = sorted((each for each in found if each[2]), key=lambda each: each[0])
    if len(answered) < 2 or answered[0][0] == answered[-1][0]:
        raise ConfigError(
            f"{name}: expected at least 2 answered requests with time between them, found "
            f"{len(answered)}"
        )
    first_s = answered[0][0]
    return Traffic(
        tuple(at - first_s for at, _, _ in answered),
        tuple(tokens for _, tokens, _ in answered),
        tuple(tokens for _, _, tokens in answered),
        len(found) - len(answered),
    )


def _json_rows(text: str, name: str) -> Iterable[tuple[int, Mapping[str, Any]]]:
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"{name}, line {line}: expected a JSON object")
        yield line, row


def _csv_rows(text: str) -> Iterable[tuple[int, Mapping[str, Any]]]:
    # With restval, a line that is too short has no None.
    return enumerate(csv.DictReader(io.StringIO(text), restval=""), start=2)


def _format_of(row: Mapping[str, Any], name: str) -> Format:
    for each in FORMATS:
        if all(column in row for column in each.columns):
            return each
    known = "; ".join(f"{', '.join(each.columns)} ({each.name})" for each in FORMATS)
    columns = ", ".join(map(str, row)) or "none"
    raise ConfigError(f"{name}: expected the columns {known}; found {columns}")


def _request(kind: Format, row: Mapping[str, Any], where: str) -> tuple[float, int, int]:
    at_s = _read(row, kind.arrival, kind.read_time, where, "a time")
    if not abs(at_s) < float("inf"):
        raise ConfigError(f"{where}: {kind.arrival}: expected a time, found {row[kind.arrival]!r}")
    input_tokens = _tokens(row, kind.input_tokens, 1, where)
    return at_s, input_tokens, _tokens(row, kind.output_tokens, 0, where)


def _tokens(row: Mapping[str, Any], column: str, least: int, where: str) -> int:
    expected = f"{least} to {MAX_TOKENS:,} tokens"
    tokens = _read(row, column, int, where, expected)
    if not least <= tokens <= MAX_TOKENS:
        raise ConfigError(f"{where}: {column}: expected {expected}, found {tokens}")
    return tokens


def _read(
    row: Mapping[str, Any], column: str, kind: Callable[[Any], T], where: str, expected: str
) -> T:
    value = row.get(column)
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: {column}: expected {expected}, found {value!r}") from None

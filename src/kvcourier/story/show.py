"""A timeline for somebody at a terminal.

Decides columns, and the sentences about who was asked and how far clocks are apart. Refuses to
know how it was put together.
"""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from kvcourier.story.accounts import Asked
from kvcourier.story.timeline import Timeline

# Who told it is in a column of its own.
_NOT_SHOWN = frozenset({"thread", "posting_thread", "continuation"})


def show_moments(timeline: Timeline) -> Table:
    """A table of what happened."""
    table = Table(title=Text(f"Transfer {timeline.key}"), title_justify="left")
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("who", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("details")
    for moment in timeline.moments:
        # Text, not str: what came from the network is no markup.
        table.add_row(
            f"{moment.at_s * 1e3:.3f}",
            Text(moment.part.value),
            Text(moment.what),
            Text(_details(moment.details)),
        )
    return table


def show_asked(timeline: Timeline) -> Text:
    """A line for everybody who was asked: what came of it, and how the clocks compare."""
    lines = [f"{each.part.value} {each.place}: {_sentence(each)}" for each in timeline.asked]
    return Text("\n".join([_CLOCKS, *lines]))


_CLOCKS = "Times are on this machine's clock; each process's own clock was compared with it:"


def _sentence(asked: Asked) -> str:
    if asked.account is None:
        return asked.problem
    entries = f"{len(asked.account.entries)} entries"
    clock = asked.account.clock
    if clock is None:
        return f"{entries}; it does not tell its clock, which is taken for ours"
    offset, uncertainty = clock.offset_s * 1e3, clock.uncertainty_s * 1e3
    return f"{entries}; its clock is {offset:+.3f} ms off, give or take {uncertainty:.3f} ms"


def _details(details: Mapping[str, Any]) -> str:
    return " ".join(
        f"{key}={_value(key, value)}" for key, value in details.items() if key not in _NOT_SHOWN
    )


def _value(key: str, value: Any) -> str:
    if key.endswith("_s") and isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value * 1e3:.3f}ms"
    return str(value)


def unknown(timeline: Timeline) -> str:
    """One sentence: nobody knows it, and who was asked."""
    asked = "; ".join(f"{each.part.value} {each.place} {each.problem}" for each in timeline.asked)
    return f"nobody tells the story of {timeline.key!r}: {asked}"

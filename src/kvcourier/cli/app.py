"""The commands, their exit codes, and how an error reaches the person at the terminal.

Decides what each kind of failure looks like outside. Refuses to know what the commands do.
"""

import enum
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvcourier.cli.bench import bench
from kvcourier.cli.demo import demo
from kvcourier.cli.doctor import doctor
from kvcourier.cli.drain import drain
from kvcourier.cli.probe import probe
from kvcourier.cli.route import route
from kvcourier.cli.serve import serve
from kvcourier.cli.story import story
from kvcourier.cli.trial import trial
from kvcourier.cli.vllm_config import vllm_config
from kvcourier.errors import ConfigError, KVCourierError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_HELP = """
Moves KV cache between prefill and decode instances over NIXL, by pull and by push.

A prefill instance, a decode instance and a router, in three terminals:

\b
    kvcourier serve --role prefill --port 8100 --side-channel-port 5600
    kvcourier serve --role decode  --port 8200 --side-channel-port 5601
    kvcourier route --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Or all of it at once, with a check of every token: kvcourier demo

Every command takes --config FILE.toml: a table named after the command ([bench.sweep] for `bench
sweep`), keys named after its flags. A flag on the command line wins.

\b
Exit codes:
    0    done, or a server stopped by SIGTERM
    1    failed
    2    a flag or a setting cannot be used
    130  interrupted by Ctrl-C (demo, probe, bench and trial: or by SIGTERM)
"""


class LogLevel(enum.StrEnum):
    """Least important kind of line that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _Commands(TyperGroup):
    """Turns our exceptions into one sentence on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _sigterm_interrupts():
                return super().invoke(ctx)
        except KVCourierError as error:
            if ctx.params.get("debug"):
                raise
            print(f"kvcourier: {error}", file=sys.stderr)
            code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
            raise typer.Exit(code) from error
        except KeyboardInterrupt as error:
            print("kvcourier: interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from error


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl-C, so that `with` blocks end children and close sockets."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


app = typer.Typer(
    cls=_Commands,
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, serve, route, drain, doctor, probe, story, trial, vllm_config):
    app.command()(command)
app.add_typer(bench, name="bench")


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the whole traceback of an error.")
    ] = False,
    log_level: Annotated[
        LogLevel, typer.Option(help="Least important lines of kvcourier's log, on stderr.")
    ] = LogLevel.INFO,
) -> None:
    """Flags of all commands; `_Commands` reads `debug`."""
    # Ours only: other libraries log a line per request at this level.
    logging.getLogger("kvcourier").setLevel(log_level.name)


def main() -> None:
    """Entry point of the `kvcourier` script; ends the process."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    app(prog_name="kvcourier")

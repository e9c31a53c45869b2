"""`kvcourier probe`.

Decides the probe's flags and how its result is shown. Refuses to know how it is measured.
"""

import typer

from kvcourier.cli.config_file import ConfigFile


def probe(config: ConfigFile = None) -> None:
    """Placeholder while the package is being written."""
    raise typer.Exit(1)

"""Flags of commands that ask instances on their side channels.

Decides their help, once for all of these commands. Refuses to know what is asked.
"""

from pathlib import Path
from typing import Annotated

import typer

SideChannelKey = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Its secret key there, as for kvcourier serve."),
]
SideChannelPeerKeys = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Public keys of the instances."),
]

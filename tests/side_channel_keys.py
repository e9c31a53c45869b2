"""Key pairs for side channels, made as an operator makes them."""

import shutil
from pathlib import Path

import zmq.auth

from kvcourier.config import ChannelKeys
from kvcourier.ids import EngineId
from kvcourier.runtime.channel_keys import read_keys


def make_keys(
    secrets: Path, folder: Path, name: str, *knows: str, pair: str | None = None
) -> ChannelKeys:
    """The keys of somebody who knows some others; each has one pair in a test.

    Args:
        secrets: where the certificates of all are.
        folder: is made, and gets the public ones of those he knows.
        pair: whose pair he has; his own if None.
    """
    folder.mkdir()
    for each in {name, *knows, pair or name}:
        if not (secrets / f"{each}.key").exists():
            zmq.auth.create_certificates(secrets, each)
    for each in knows:
        shutil.copy(secrets / f"{each}.key", folder)
    found = read_keys(secrets / f"{pair or name}.key_secret", folder, EngineId(name))
    assert found is not None
    return found

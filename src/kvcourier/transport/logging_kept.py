"""Imports that must not change the program's logging.

Decides what of `logging` is put back after an import. Refuses to know what is imported.
"""

import logging
import logging.config
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logging_kept() -> Iterator[None]:
    """Keep a library that configures logging on import from changing the program's.

    NIXL calls `logging.config.dictConfig`, which closes every handler of the process, and turns
    `logging.raiseExceptions` off. Without that call its logger has no handler of its own and
    reports to the program's.
    """
    configure, raise_exceptions = logging.config.dictConfig, logging.raiseExceptions
    logging.config.dictConfig = lambda config: None
    try:
        yield
    finally:
        logging.config.dictConfig = configure
        logging.raiseExceptions = raise_exceptions

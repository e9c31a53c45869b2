"""One decoder under Atheris, which sees the branches an input takes: more inputs, by bytes only.

    pip install atheris
    PYTHONPATH=tests python -m fuzz.guided "handshake answer" -max_total_time=60

Options after the decoder's name are libFuzzer's. Atheris is no dependency of the tests: there are
wheels for few versions of Python.
"""

import logging
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvcourier"]):
    from fuzz.targets import PURE


def main() -> None:
    """Feed it until an option says stop, or something is found; does not return."""
    name, *options = sys.argv[1:]
    found = [target for target in PURE if target.name == name]
    if not found:
        raise SystemExit(f"expected one of {[target.name for target in PURE]}, found {name!r}")
    (target,) = found
    logging.disable()

    def feed(payload: bytes) -> None:
        target.feed(payload)

    with tempfile.TemporaryDirectory() as corpus:
        for number, example in enumerate(target.examples):
            (Path(corpus) / str(number)).write_bytes(example)
        atheris.Setup([sys.argv[0], corpus, *options], feed)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

"""Settings of all tests.

Runs are repeatable: Hypothesis draws the same examples every time where CI is set, and never
judges by the clock. pytest-timeout's limit is in pyproject.toml.
"""

import os
import signal

# A shell starts what it runs in the background with SIGINT ignored, and children inherit that: the
# commands that tests interrupt would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported anywhere, here or in a child: several test processes on few cores would
# otherwise fight over them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "local", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")

"""`kvcourier serve` on a machine whose clock is two minutes ahead.

PYTHONPATH=tests python -m e2e.skewed_instance serve ...
"""

import sys
import time

from kvcourier.cli.app import main

AHEAD_S = 120.0
_true_time = time.time

if __name__ == "__main__":
    time.time = lambda: _true_time() + AHEAD_S
    sys.argv[0] = "kvcourier"
    main()

"""A load: requests at their times, then what became of them.

Decides how a plan is run against the clock. Refuses to know what is planned and what is compared.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from kvcourier.bench.client import Ask, send
from kvcourier.bench.samples import Outcome

OnOutcome = Callable[[Outcome], None]


async def run_load(
    client: httpx.AsyncClient,
    asks: Sequence[Ask],
    arrivals_s: Sequence[float],
    timeout_s: float,
    on_outcome: OnOutcome = lambda outcome: None,
) -> list[Outcome]:
    """Send each request at its time, whether or not earlier ones were answered (open loop).

    Returns when all have an outcome, in the order of the requests.
    """
    start_s = time.perf_counter()

    async def one(ask: Ask, arrival_s: float) -> Outcome:
        await asyncio.sleep(start_s + arrival_s - time.perf_counter())
        lag_s = time.perf_counter() - start_s - arrival_s
        outcome = await send(client, ask, timeout_s, lag_s)
        on_outcome(outcome)
        return outcome

    return list(await asyncio.gather(*map(one, asks, arrivals_s)))

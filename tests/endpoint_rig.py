"""A whole instance without an engine: real endpoint, couriers and side channel, caches in memory.

For tests that drive transfers by the engine's calls and look at the bytes.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from kv_content import touched_blocks, write_prompt, wrong_cells
from kvcourier.allow_list import AllowList
from kvcourier.config import (
    ChannelKeys,
    CourierConfig,
    EndpointConfig,
    Integrity,
    Limits,
    PathPolicy,
    Posting,
    StagingConfig,
    Timing,
    TransferMode,
)
from kvcourier.core.params import Intent, parse_params
from kvcourier.ids import EngineId, Rank, RequestId
from kvcourier.layout import RankCache, TokenSpan, instance_geometries
from kvcourier.runtime.endpoint import KvEndpoint
from kvcourier.runtime.rank import TransportFactory
from kvcourier.runtime.reports import Outcome, Report
from layout_builders import Buffer, PlacementStyle, make_instance, model_cache

WAIT_S = 20.0
DIRECT = StagingConfig(path=PathPolicy.DIRECT)


class Rig:
    """One instance whose engine is the test.

    `rank_caches` are caches of several groups, with which the test calls the endpoint itself.
    """

    def __init__(
        self,
        engine_id: str,
        transport_factory: TransportFactory,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        style: PlacementStyle = PlacementStyle.SEPARATE,
        timing: Timing | None = None,
        modes: frozenset[TransferMode] = frozenset(TransferMode),
        model_name: str = "test-model",
        port: int = 0,
        staging: StagingConfig = DIRECT,
        posting: Posting = Posting.THREAD,
        allowed_peers: AllowList | None = None,
        keys: ChannelKeys | None = None,
        integrity: Integrity = Integrity.OFF,
        rank_caches: Mapping[Rank, tuple[RankCache, list[Buffer]]] | None = None,
        tells_stories: bool = False,
        **model: object,
    ) -> None:
        self.caches = make_instance(
            instance_geometries(model_cache(**model), tp_size, pp_size), style
        )
        self.rank_caches = rank_caches or {
            rank: (RankCache((cache,)), buffers) for rank, (cache, buffers) in self.caches.items()
        }
        self.endpoint = KvEndpoint(
            EndpointConfig(
                EngineId(engine_id),
                model_name,
                modes=modes,
                side_channel_host="127.0.0.1",
                side_channel_port=port,
                timing=timing or Timing(),
                courier=CourierConfig(staging=staging),
                allowed_peers=allowed_peers,
                keys=keys,
                integrity=integrity,
                tells_stories=tells_stories,
            ),
            [cache for cache, _ in self.rank_caches.values()],
            transport_factory,
            posting=posting,
        )
        self._news = threading.Condition()
        self.reports: list[Report] = []
        self.endpoint.start(self._on_report)

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *exc: object) -> None:
        self.endpoint.close()

    def _on_report(self) -> None:
        with self._news:
            self._news.notify_all()

    def wait_for(self, request_id: str, *outcomes: Outcome) -> list[Report]:
        """Until each outcome of the request has been reported; returns all of its reports."""
        self.wait_until(lambda: set(outcomes) <= {each.outcome for each in self.of(request_id)})
        return self.of(request_id)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds; looked at after every report."""
        deadline = time.monotonic() + WAIT_S
        with self._news:
            while True:
                self.reports += self.endpoint.poll()
                if condition():
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"nothing more came; reports: {self.reports}")
                self._news.wait(min(left, 0.05))

    def of(self, request_id: str) -> list[Report]:
        """What has come to an end of one request so far; that it is held may be told in between."""
        return [
            each
            for each in self.reports
            if each.request_id == request_id and each.outcome is not Outcome.HELD
        ]

    def coordinates(self) -> dict[str, object]:
        """What a router puts in the D leg of a push."""
        info = self.endpoint.instance_info()
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": info["engine_id"],
            "remote_host": info["side_channel_host"],
            "remote_port": info["side_channel_port"],
            "tp_size": info["tp_size"],
            "pp_size": info["pp_size"],
        }

    def hold(self, request_id: str, transfer_id: str | None) -> None:
        """Accept a prompt that somebody wants."""
        self.endpoint.begin_hold(
            RequestId(request_id), intent({"do_remote_decode": True, "transfer_id": transfer_id})
        )

    def prefill(
        self, request_id: str, prompt: str, blocks: Sequence[int], num_tokens: int
    ) -> dict[str, object]:
        """Compute a prompt's KV and hand it over."""
        write_prompt(self.caches, prompt, blocks, TokenSpan(0, num_tokens))
        return self.endpoint.finish_prefill(RequestId(request_id), [list(blocks)], num_tokens)

    def expect(self, request_id: str, params: dict[str, object]) -> None:
        """Accept a request whose KV somebody holds."""
        self.endpoint.expect(RequestId(request_id), intent(params))

    def receive(self, request_id: str, blocks: Sequence[int], start: int, stop: int) -> None:
        """Reserve blocks for the KV of positions [start, stop)."""
        self.endpoint.receive(RequestId(request_id), [list(blocks)], TokenSpan(start, stop))

    def wrong(self, prompt: str, blocks: Sequence[int], start: int, stop: int) -> list[str]:
        """Cells of these positions that are not the prompt's."""
        return wrong_cells(self.caches, prompt, blocks, TokenSpan(start, stop), start)

    def touched(self) -> set[int]:
        """Blocks that were written."""
        return touched_blocks(self.caches)

    def whats(self, key: str) -> list[str]:
        """The story of a transfer, headlines only."""
        return [entry["what"] for entry in self.endpoint.story(key) or ()]


def intent(params: dict[str, object]) -> Intent:
    """What a request's kv_transfer_params ask for."""
    parsed = parse_params(params, Limits())
    assert parsed is not None
    return parsed

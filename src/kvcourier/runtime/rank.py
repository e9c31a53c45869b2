"""Putting one rank's part together: transport, side channel, core and courier.

Decides nothing but the order of construction. Refuses to know whether the rank's engine lives in
this process (`endpoint`) or its scheduler in another one (`engine_link`).
"""

from collections.abc import Callable, Mapping

from kvcourier.config import EndpointConfig, Integrity
from kvcourier.core import handshake
from kvcourier.core.endpoint import Endpoint
from kvcourier.core.outcomes import Report
from kvcourier.ids import AgentName, Incarnation, InstanceAddress, PeerRank, Rank
from kvcourier.layout.geometry import GroupGeometries, RankCache
from kvcourier.runtime.courier import Courier
from kvcourier.runtime.engine_link import EngineToken
from kvcourier.runtime.metrics import CourierObserver
from kvcourier.runtime.staging import open_staging_pair
from kvcourier.runtime.surroundings import MACHINE, Surroundings
from kvcourier.transport.interface import Transport

TransportFactory = Callable[[AgentName], Transport]


def open_rank(
    config: EndpointConfig,
    incarnation: Incarnation,
    cache: RankCache,
    geometries: Mapping[Rank, GroupGeometries],
    transport_factory: TransportFactory,
    *,
    server_port: int,
    observer: CourierObserver,
    on_report: Callable[[Report], None],
    on_death: Callable[[], None],
    engine_token: EngineToken | None = None,
    surroundings: Surroundings = MACHINE,
) -> tuple[Courier, handshake.RankOffer]:
    """Register a rank's memory and open its sockets; the courier is not started.

    Args:
        geometries: cache groups of every rank of the instance.
        server_port: where the instance's handshake server listens, told to peers.
        engine_token: proves that an engine call over the side channel is our own scheduler's;
            None where the engine calls `Courier.submit` itself.
        surroundings: time and sockets.

    Raises:
        ConfigError: a socket or the transport cannot be opened.
        RegistrationFailed: memory could not be registered.
    """
    me = PeerRank(config.engine_id, incarnation, cache.rank)
    transport = transport_factory(AgentName(f"{config.engine_id}:{incarnation[:12]}:{cache.rank}"))
    staging = open_staging_pair(cache, config.courier.staging)
    transport.register([*cache.regions, *staging.regions])
    channel = surroundings.open_channel(
        me, config.side_channel_host, config.limits.max_message_bytes, config.keys
    )
    courier = Courier(
        Endpoint(
            me,
            InstanceAddress(config.engine_id, config.side_channel_host, server_port),
            geometries,
            config.timing,
            config.limits,
            # Asked only once the courier runs.
            lambda command: courier.prefers_write(command),
            config.allowed_peers,
            config.integrity,
        ),
        cache,
        transport,
        staging,
        channel,
        handshake.facts_of(config.model, geometries, config.cache_format),
        config=config.courier,
        limits=config.limits,
        observer=observer,
        on_report=on_report,
        on_death=on_death,
        engine_token=engine_token,
        tells_stories=config.tells_stories,
        takes_digests=config.integrity is not Integrity.OFF,
        clock=surroundings.clock,
    )
    offer = handshake.rank_offer(
        cache,
        transport.agent_name,
        transport.agent_metadata(),
        channel.port,
        courier.staging_offer,
        staging.send is not None,
    )
    return courier, offer

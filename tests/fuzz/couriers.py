"""Couriers in mid-transfer as decoders: whatever a peer says, a courier lives on.

Decides in which state they are when something comes. Both instances run the real couriers, cores
and packed paths on virtual time; every input comes to P and to D, over the side channel and over
the data path, from the peer that each knows. So it passes as that peer's word, and only what it
says can be wrong.
"""

import contextlib
from collections.abc import Callable

from fuzz.targets import MESSAGES_CODEC, Target
from kvcourier.config import Granularity, Limits, PathPolicy, StagingConfig
from kvcourier.core.messages import decode
from kvcourier.errors import RemoteProtocolError, TransportError
from kvcourier.ids import PeerRank
from kvcourier.sim.invariants import Violation
from kvcourier.transport.memory import Fate, InFlight
from worlds.scene import BLOCK, DIRECT, PULL, PUSH, Scene

Send = Callable[[PeerRank, bytes], bool]

_INPUTS_A_SCENE = 20
_STEP_S = 0.003
_PACKED = StagingConfig(
    path=PathPolicy.PACKED, send_bytes=2 << 12, receive_bytes=2 << 12, slot_bytes=1 << 12
)
_LIMITS = Limits()


def _scene(staging: StagingConfig) -> Scene:
    return Scene(granularity=Granularity.CHUNK, staging=staging, max_batch_tokens=2 * BLOCK)


def _begin(scene: Scene) -> None:
    """A push and a pull get as far as they come while nothing that sets out arrives."""
    scene.decide(lambda item: None if item.is_notification else Fate.HOLD)
    scene.ask(PUSH, range(8 * BLOCK))
    scene.ask(PULL, range(100, 100 + 4 * BLOCK))
    scene.advance(0.05)


class Couriers:
    """P and D, made anew every so many inputs, as what was said before changes them."""

    def __init__(self, staging: StagingConfig) -> None:
        self._staging = staging
        self._num_inputs = 0

    def feed(self, payload: bytes) -> bool:
        """Say it to both; whether it was a message at all."""
        if self._num_inputs % _INPUTS_A_SCENE == 0:
            self._scene = _scene(self._staging)
            _begin(self._scene)
        self._num_inputs += 1
        try:
            self._say(payload)
        except Violation:
            # A forged registration names blocks of D that are not its own. Only D could know.
            self._num_inputs = 0
        try:
            decode(payload, _LIMITS)
        except RemoteProtocolError:
            return False
        return True

    def _say(self, payload: bytes) -> None:
        scene = self._scene
        (p,), (d,) = scene.life("p0").couriers, scene.life("d0").couriers
        for source, target in ((p, d), (d, p)):
            source._channel.send(target.endpoint.me, payload)
            # Over the data path it has no way to say anything before it is connected.
            with contextlib.suppress(TransportError):
                source._transport.notify(target._transport.agent_name, payload)
        scene.advance(_STEP_S)
        for courier in (p, d):
            courier.endpoint.check()
            courier._receiver._core.check()
            courier._postings._packed._core.check()


def _said(staging: StagingConfig) -> list[bytes]:
    """All that the two say to each other when such a scene comes to its good end."""
    said: dict[bytes, None] = {}
    scene = _scene(staging)

    def listen(item: InFlight) -> None:
        if item.payload:
            said[item.payload] = None

    scene.decide(listen)
    for channel in scene.world.wire.channels.values():

        def send(peer: PeerRank, payload: bytes, send: Send = channel.send) -> bool:
            said[payload] = None
            return send(peer, payload)

        channel.send = send  # type: ignore[method-assign]
    scene.end(scene.ask(PUSH, range(8 * BLOCK)), scene.ask(PULL, range(100, 100 + 4 * BLOCK)))
    return list(said)


def targets() -> list[Target]:
    """Couriers that move blocks directly, and such that pack them."""
    return [
        Target(f"couriers: {name}", _said(staging), MESSAGES_CODEC, Couriers(staging).feed)
        for name, staging in (("direct", DIRECT), ("packed", _PACKED))
    ]

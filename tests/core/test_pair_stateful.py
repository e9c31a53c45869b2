"""Random lives of a pair: every order of events, losses, doubles, aborts, restarts and time.

The invariants are in `pair.Pair`; at the end of each run the faults stop and S4 and S5 must hold:
every request has its terminal report, every block is back, every table is empty, and a fresh
request is served.
"""

import os

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvcourier.config import Integrity, Timing
from kvcourier.core.outcomes import Outcome
from pair import TERMINAL, Pair

WINDOWED = {"num_blocks": 20, "groups": [((0,), None), ((1,), 20)]}
SHAPES = st.sampled_from(
    [
        ({"num_blocks": 12}, {"num_blocks": 12}),
        ({"num_blocks": 12, "tp_size": 2}, {"num_blocks": 12}),
        ({"num_blocks": 12}, {"num_blocks": 12, "tp_size": 2}),
        ({"num_blocks": 12, "pp_size": 2}, {"num_blocks": 6, "block_size": 32}),
        (
            {"num_blocks": 12, "num_kv_heads": 1, "tp_size": 2},
            {"num_blocks": 12, "num_kv_heads": 1},
        ),
        (WINDOWED, WINDOWED),
        (WINDOWED | {"tp_size": 2}, WINDOWED | {"block_size": 8, "num_blocks": 40}),
        ({"num_blocks": 20}, WINDOWED),
    ]
)
TIMING = Timing(
    kv_lease_duration=20.0, heartbeat_s=3.0, quarantine_limit_s=1e6, beat_s=2.0, peer_silence_s=6.0
)


class PairMachine(RuleBasedStateMachine):
    """One pair; request names tell their kind."""

    holds = Bundle("holds")
    prompts = Bundle("prompts")
    wants = Bundle("wants")

    @initialize(
        shapes=SHAPES,
        skew=st.floats(-1e5, 1e5),
        rate=st.sampled_from([0.9, 1.0, 1.1]),
        written_pulls=st.booleans(),
        integrity=st.sampled_from(Integrity),
    )
    def begin(self, shapes, skew, rate, written_pulls, integrity):
        self.pair = Pair(*shapes, timing=TIMING, written_pulls=written_pulls, integrity=integrity)
        self.pair.decode.skew, self.pair.decode.rate = skew, rate
        self.count = 0
        self.tokens = {}
        self.life = {}
        self.written = {}
        self.reserved = set()
        self.wanted = {}
        self.aborted = set()
        self.bindings = {}

    def name(self, letter):
        self.count += 1
        return f"{letter}{self.count}"

    def alive(self, request_id):
        side = self.pair.prefill if request_id[0] == "p" else self.pair.decode
        return self.life[request_id] == side.life

    @rule(
        target=holds,
        num_tokens=st.integers(1, 60),
        mode=st.sampled_from(["push", "pull"]),
        rebindable=st.booleans(),
    )
    def hold(self, num_tokens, mode, rebindable=False):
        request_id = self.name("p")
        transfer_id = f"t-{request_id}" if mode == "push" else None
        self.tokens[request_id] = num_tokens
        self.life[request_id] = self.pair.prefill.life
        if rebindable:
            self.bindings[request_id] = 0
        self.pair.hold(request_id, transfer_id, rebindable=rebindable)
        return request_id, mode

    def next_binding(self, hold):
        """The router's count, where the hold outlives its wanter."""
        binding = self.bindings.get(hold)
        if binding is not None:
            self.bindings[hold] += 1
        return binding

    @rule(target=wants, hold=holds, reads=st.booleans())
    def want_push(self, hold, reads):
        if hold[1] != "push":
            return None
        request_id = self.name("d")
        self.life[request_id] = self.pair.decode.life
        self.tokens[request_id] = self.tokens[hold[0]]
        binding = self.next_binding(hold[0])
        self.pair.want_push(request_id, f"t-{hold[0]}", reads=reads, binding=binding)
        return request_id, hold[0]

    @rule(target=wants, hold=holds, part=st.floats(0, 1), reads=st.booleans(), told=st.booleans())
    def rebind(self, hold, part, reads, told):
        """The router cancels one wanter in mid-push and sends another for the same prompt."""
        if hold[0] not in self.bindings or hold[1] != "push":
            return None
        first = self.want_push(hold, reads)
        if self.pair.reserve(first[0], f"prompt-{hold[0]}", 0, self.tokens[hold[0]]):
            self.reserved.add(first[0])
        if told:
            self.pair.deliver_all()
        self.advance_prefill(hold, part, None)
        self.abort_request(first[0])
        return self.want_push(hold, False)

    @rule(
        target=holds,
        num_tokens=st.integers(17, 60),
        cached=st.booleans(),
        reads=st.sampled_from([False, False, True]),
        rebindable=st.booleans(),
    )
    def register_early(self, num_tokens, cached, reads, rebindable):
        """A push as it should be: P knows where to write before it has computed anything."""
        hold = self.hold(num_tokens, "push", rebindable)
        want = self.want_push(hold, reads)
        self.reserve(want, 0.5 if cached else 0.0)
        self.pair.deliver_all()
        return hold

    @rule(
        hold=holds,
        part=st.floats(0, 1),
        layers=st.sampled_from([None, None, (0,), (1,), (0, 1)]),
    )
    def advance_prefill(self, hold, part, layers):
        request_id, num_tokens = hold[0], self.tokens[hold[0]]
        if self.alive(request_id) and request_id not in self.aborted:
            num_written = max(1, round(part * num_tokens), self.written.get(request_id, 0))
            if self.pair.advance_prefill(
                request_id, f"prompt-{request_id}", num_tokens, num_written, layers
            ):
                self.written[request_id] = num_written

    @rule(hold=holds)
    def roll_back(self, hold):
        if hold[0] in self.pair.computing:
            self.written.pop(hold[0], None)
            self.pair.roll_back(hold[0])

    @rule(target=prompts, hold=consumes(holds))
    def finish(self, hold):
        request_id, mode = hold
        num_tokens = self.tokens[request_id]
        if not self.alive(request_id) or request_id in self.aborted:
            return None
        if request_id not in self.pair.computing and not self.pair.prefill.fits(num_tokens):
            self.abort_request(request_id)
            return None
        blocks = self.pair.finish(request_id, f"prompt-{request_id}", num_tokens)
        return request_id, mode, blocks

    @rule(target=wants, prompt=prompts)
    def want_pull(self, prompt):
        if prompt is None or prompt[1] != "pull":
            return None
        request_id = self.name("d")
        self.life[request_id] = self.pair.decode.life
        self.tokens[request_id] = self.tokens[prompt[0]]
        self.pair.want_pull(request_id, prompt[0], prompt[2], self.next_binding(prompt[0]))
        return request_id, prompt[0]

    @rule(want=consumes(wants), cached=st.floats(0, 1))
    def reserve(self, want, cached):
        if want is not None and self.alive(want[0]) and want[0] not in self.aborted:
            self.give_blocks(want, cached)

    def give_blocks(self, want, cached):
        num_tokens = self.tokens[want[0]]
        step = self.pair.decode.block_size
        start = int(cached * (num_tokens - 1)) // step * step
        if self.pair.reserve(want[0], f"prompt-{want[1]}", start, num_tokens):
            self.reserved.add(want[0])
            self.wanted[want[0]] = want[1]
        else:
            self.abort_request(want[0])

    @precondition(lambda self: self.of_decode(self.reserved))
    @rule(data=st.data())
    def recall(self, data):
        """D needs the blocks for another request."""
        self.pair.recall(data.draw(st.sampled_from(self.of_decode(self.reserved)), "request"))

    @precondition(lambda self: self.of_decode(self.pair.decode.given_back))
    @rule(data=st.data(), cached=st.floats(0, 1))
    def reserve_again(self, data, cached):
        given_back = self.of_decode(self.pair.decode.given_back)
        request_id = data.draw(st.sampled_from(given_back), "request")
        self.give_blocks((request_id, self.wanted[request_id]), cached)

    def of_decode(self, request_ids):
        return sorted(each for each in request_ids if self.alive(each) and each not in self.aborted)

    @rule(want=consumes(wants))
    def decline(self, want):
        if want is not None and self.alive(want[0]) and want[0] not in self.aborted:
            self.aborted.add(want[0])
            self.pair.decline(want[0])

    @precondition(lambda self: self.life)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.life)), "request")
        if self.alive(request_id):
            self.abort_request(request_id)

    def abort_request(self, request_id):
        self.aborted.add(request_id)
        side = self.pair.prefill if request_id[0] == "p" else self.pair.decode
        self.pair.abort(side, request_id)

    @precondition(lambda self: self.pair.items)
    @rule(index=st.integers(0, 200))
    def deliver(self, index):
        self.pair.deliver(self.pair.items[index % len(self.pair.items)])

    @precondition(lambda self: self.pair.items)
    @rule()
    def deliver_all(self):
        self.pair.deliver_all()

    @precondition(lambda self: self.pair.items)
    @rule(index=st.integers(0, 200))
    def drop(self, index):
        self.pair.drop(self.pair.items[index % len(self.pair.items)])

    @precondition(lambda self: any(item.fail is None for item in self.pair.items))
    @rule(index=st.integers(0, 200))
    def duplicate(self, index):
        messages = [item for item in self.pair.items if item.fail is None]
        self.pair.duplicate(messages[index % len(messages)])

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 25.0, 90.0]))
    def advance(self, seconds):
        self.pair.advance(seconds)

    @rule(which=st.sampled_from(["p", "d"]))
    def restart(self, which):
        self.pair.restart(self.pair.sides[which])

    @invariant()
    def every_block_has_one_owner(self):
        for side in self.pair.sides.values() if hasattr(self, "pair") else ():
            lent = [block for blocks in side.lent.values() for block in blocks]
            owned = sorted(lent + side.free)
            assert owned == sorted(set(owned)), f"S1: {side.name} has a block twice: {owned}"

    def teardown(self):
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        for request_id in sorted(self.life):
            side = pair.prefill if request_id[0] == "p" else pair.decode
            unfinished = request_id[0] == "p" and is_computing(pair, request_id)
            has_blocks = request_id in self.reserved - pair.decode.given_back
            waiting = request_id[0] == "d" and not has_blocks
            if self.alive(request_id) and (unfinished or waiting):
                self.abort_request(request_id)
        pair.settle()
        for side in pair.sides.values():
            assert sorted(side.free) == list(side.pool), f"S5: {side.name} lost blocks"
        for request_id in self.reserved - pair.decode.given_back:
            if self.alive(request_id):
                told = pair.decode.outcomes(request_id)
                assert Outcome.RELEASED in told or request_id in self.aborted
                assert request_id in self.aborted or told & TERMINAL, f"S4: {request_id} {told}"
        self.serves_a_fresh_request()

    def serves_a_fresh_request(self):
        pair = self.pair
        for reads in (False, True):
            name = f"last-{reads}"
            pair.hold(f"p-{name}", f"t-{name}")
            pair.want_push(f"d-{name}", f"t-{name}", reads=reads)
            assert pair.reserve(f"d-{name}", name, 0, 30)
            pair.deliver_all()
            pair.finish(f"p-{name}", name, 30)
            pair.deliver_all()
            told = pair.decode.outcomes(f"d-{name}")
            assert told == {Outcome.RECEIVED, Outcome.RELEASED}, pair.decode.reasons


def is_computing(pair, request_id):
    """Whether P's engine has begun this prompt and not handed its blocks over."""
    if request_id in pair.computing:
        return True
    return request_id not in pair.prefill.lent and not pair.prefill.outcomes(request_id)


TestPairMachine = PairMachine.TestCase
TestPairMachine.settings = settings(
    max_examples=int(os.environ.get("PAIR_EXAMPLES", "150")), stateful_step_count=50, deadline=None
)

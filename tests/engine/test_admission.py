"""Nobody waits for ever: two engines that are short of blocks, and every order of events.

The schedulers are the real ones; what is between them is a bag of messages that arrive in any
order. Nothing here knows time, so no deadline can help: a run in which nothing can happen any more
must have ended all requests.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.engine.blocks import BlockPool
from kvcourier.engine.scheduler import Remote, Scheduler, Sequence
from kvcourier.ids import RequestId

BLOCK_SIZE = 4
EARLY, LATE_PUSH, PULL, ON_P, ON_D = "early push", "late push", "pull", "on P", "on D"
_MAX_EVENTS = 20_000


class Stuck(AssertionError):
    """Nothing can happen any more, and somebody waits."""


@dataclass
class Request:
    """One prompt, which begins with some tokens that all have in common, and its answer; `epoch`
    counts its registrations."""

    kind: str
    num_tokens: int
    num_answer: int
    num_common: int = 0
    prefill: Sequence | None = None
    decode: Sequence | None = None
    epoch: int = 0
    registered: int = -1
    cancelled: int = -1
    is_done: bool = False
    is_kept: bool = False
    is_declined: bool = False


@dataclass
class Pair:
    """P and D, and everything on its way between them."""

    requests: list[Request]
    blocks: tuple[int, int]
    chance: random.Random
    bag: list[Callable[[], None]] = field(default_factory=list)
    num_recalls: int = 0

    def __post_init__(self) -> None:
        self.p, self.d = (
            Scheduler(BlockPool(count), block_size=BLOCK_SIZE, max_batch_tokens=8, max_num_seqs=4)
            for count in self.blocks
        )
        for number, request in enumerate(self.requests):
            if request.kind != ON_D:
                self.bag.append(lambda n=number: self.arrive(self.p, n))
            if request.kind in (EARLY, ON_D):
                self.bag.append(lambda n=number: self.arrive(self.d, n))

    # What arrives.

    def arrive(self, scheduler: Scheduler, number: int) -> None:
        request = self.requests[number]
        tokens = [100 * number + each for each in range(request.num_tokens)]
        num_common = min(request.num_common, request.num_tokens)
        tokens[:num_common] = range(num_common)
        name = RequestId(str(number))
        sequence = Sequence(name, number, tokens)
        if scheduler is self.p:
            request.prefill = sequence
        else:
            request.decode = sequence
            if request.kind != ON_D:
                sequence.remote = Remote(name, len(tokens), threshold=1)
                sequence.is_held = request.kind == PULL
                self.send(lambda: self.renew(request))
        scheduler.add(sequence)

    def send(self, message: Callable[[], None]) -> None:
        self.bag.append(message)

    def renew(self, request: Request) -> None:
        """D asks P; P answers now, or when the prompt is finished, as in `Holder`."""
        if request.is_kept:
            self.send(lambda: self.on_held(request))

    def on_held(self, request: Request) -> None:
        if request.decode is not None:
            request.decode.is_held = True

    def register(self, request: Request, epoch: int) -> None:
        if epoch > request.cancelled:
            request.registered = epoch
            self.serve(request)

    def serve(self, request: Request) -> None:
        if request.is_kept and request.registered >= 0:
            self.send(lambda: self.on_landed(request))

    def on_landed(self, request: Request) -> None:
        assert request.decode is not None
        if request.is_kept:
            self.d.received(request.decode)
            self.let_go(request)

    def let_go(self, request: Request) -> None:
        if request.is_kept:
            request.is_kept = False
            assert request.prefill is not None
            assert self.p.loans.take_back(request.prefill.request_id)
        request.is_declined = True

    def cancel(self, request: Request, epoch: int) -> None:
        """D takes a registration back; nothing stands in the way of a prompt that is finished."""
        if (request.is_kept and request.registered == epoch) or request.is_declined:
            return
        request.cancelled, request.registered = epoch, -1
        self.send(lambda: self.on_fenced(request))
        self.renew(request)

    def on_fenced(self, request: Request) -> None:
        assert request.decode is not None and request.decode.is_recalled
        self.d.recalled(request.decode)

    # What the engines do.

    def step_p(self) -> bool:
        batch = self.p.schedule()
        self.p.take_preempted()
        for work in batch:
            self.p.computed(work)
            if work.completes:
                self.say(self.p, self.requests[int(work.sequence.request_id)], work.sequence)
        return bool(batch)

    def step_d(self) -> bool:
        admissions = self.d.admit_remote()
        for admission in admissions:
            request = self.requests[int(admission.sequence.request_id)]
            if admission.blocks:
                epoch, request.epoch = request.epoch, request.epoch + 1
                self.send(lambda r=request, e=epoch: self.register(r, e))
            else:
                self.send(lambda r=request: self.let_go(r))
        batch = self.d.schedule()
        self.d.take_preempted()
        recalls = self.d.take_recalls()
        for sequence in recalls:
            assert not sequence.is_held
            request = self.requests[int(sequence.request_id)]
            self.send(lambda r=request: self.cancel(r, r.epoch - 1))
        self.num_recalls += len(recalls)
        for work in batch:
            self.d.computed(work)
            if work.completes:
                self.say(self.d, self.requests[int(work.sequence.request_id)], work.sequence)
        return bool(batch or admissions or recalls)

    def say(self, scheduler: Scheduler, request: Request, sequence: Sequence) -> None:
        """It has a token more; the one that P says of a prompt for D is its last."""
        sequence.tokens.append(7)
        if scheduler is self.p and request.kind != ON_P:
            self.finish_prefill(request, sequence)
        elif len(sequence.tokens) >= request.num_tokens + request.num_answer:
            scheduler.remove(sequence)
            request.is_done = True

    def finish_prefill(self, request: Request, sequence: Sequence) -> None:
        count = -(-request.num_tokens // BLOCK_SIZE)
        lent, sequence.blocks = sequence.blocks[:count], sequence.blocks[count:]
        self.p.loans.lend(sequence.request_id, lent)
        self.p.remove(sequence)
        request.is_kept = True
        if request.is_declined:
            self.let_go(request)
        elif request.kind in (PULL, LATE_PUSH):
            number = self.requests.index(request)
            self.send(lambda: self.arrive(self.d, number))
        elif request.registered >= 0:
            self.serve(request)
        else:
            self.send(lambda: self.on_held(request))

    # Runs.

    def run(self) -> None:
        """Until nothing can happen; raises Stuck if somebody waits then."""
        for _ in range(_MAX_EVENTS):
            choice = self.chance.random()
            if self.bag and choice < 0.5:
                self.bag.pop(self.chance.randrange(len(self.bag)))()
            elif (self.step_p if choice < 0.75 else self.step_d)():
                pass
            elif not self.bag and not self.step_p() and not self.step_d():
                break
        else:
            raise Stuck(f"no end: {self.requests}")
        waiting = [request for request in self.requests if not request.is_done]
        if waiting:
            raise Stuck(f"{len(waiting)} of {len(self.requests)} wait for ever: {waiting}")
        for scheduler, count in zip((self.p, self.d), self.blocks, strict=True):
            assert scheduler.pool.num_free == count
            assert not scheduler.loans


def prompts(*kinds: str, num_tokens: int = 8, num_answer: int = 4) -> list[Request]:
    return [Request(kind, num_tokens, num_answer) for kind in kinds]


def circular(kinds: tuple[str, ...], blocks: tuple[int, int], seeds: range) -> list[Pair]:
    """Every order of these requests that these seeds draw."""
    return [Pair(prompts(*kinds), blocks, random.Random(seed)) for seed in seeds]


SHORT = {
    "push alone": ((EARLY,) * 6, (4, 4)),
    "pull and push": ((PULL, EARLY) * 3, (4, 4)),
    "late and early pushes": ((LATE_PUSH, EARLY) * 3, (4, 4)),
    "with local ones": ((PULL, EARLY, ON_D, ON_P) * 2, (4, 5)),
    "one at a time": ((EARLY, PULL) * 3, (2, 3)),
}


@pytest.mark.parametrize("case", SHORT)
def test_all_end_whatever_comes_first(case: str) -> None:
    kinds, blocks = SHORT[case]
    pairs = circular(kinds, blocks, range(200))
    for pair in pairs:
        pair.run()
    assert sum(pair.num_recalls for pair in pairs), "nobody was ever short"


@pytest.mark.parametrize("case", ["push alone", "pull and push", "with local ones"])
def test_without_recalls_they_wait_for_each_other(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the rule is for: P keeps what D cannot take, D keeps blocks for what P cannot begin.
    monkeypatch.setattr(Scheduler, "take_recalls", lambda self: [])
    kinds, blocks = SHORT[case]
    num_stuck = 0
    for pair in circular(kinds, blocks, range(200)):
        try:
            pair.run()
        except Stuck:
            num_stuck += 1
    assert num_stuck


@settings(max_examples=400, deadline=None)
@given(
    requests=st.lists(
        st.builds(
            Request,
            kind=st.sampled_from([EARLY, EARLY, LATE_PUSH, PULL, ON_P, ON_D]),
            num_tokens=st.integers(1, 24),
            num_answer=st.integers(1, 12),
            num_common=st.sampled_from([0, 0, 8, 16]),
        ),
        min_size=1,
        max_size=10,
    ),
    blocks=st.tuples(st.integers(9, 14), st.integers(9, 14)),
    seed=st.integers(0, 2**32),
)
def test_no_reachable_state_is_stuck(
    requests: list[Request], blocks: tuple[int, int], seed: int
) -> None:
    Pair(requests, blocks, random.Random(seed)).run()

"""Nobody waits for ever: P and D, both short of blocks, and every order of events.

D's scheduler goes by vLLM's rules in what matters here: it asks one waiting request after the
other, stops at the first that finds no blocks, takes nothing back from one that waits for KV, and
preempts the youngest that runs. Nothing here knows time, so no deadline can help.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourier.ids import RequestId
from kvcourier.vllm_connector.admission import Admission

PUSH, PULL, ON_D = "push", "pull", "on D"
_MAX_EVENTS = 5_000


class Stuck(AssertionError):
    """Nothing can happen any more, and somebody waits."""


@dataclass(eq=False)
class Request:
    """A prompt and its answer, in blocks."""

    kind: str
    num_prompt: int
    num_answer: int = 1
    name: RequestId = field(init=False)
    on_p: str = "waits"
    blocks: list[int] = field(default_factory=list)
    num_needed: int = 0
    is_received: bool = False
    is_preempted: bool = False
    is_done: bool = False

    @property
    def comes(self) -> bool:
        """Whether its KV is to come when it gets blocks."""
        return self.kind != ON_D and not self.is_preempted

    @property
    def is_loading(self) -> bool:
        return bool(self.blocks) and self.comes and not self.is_received


@dataclass
class Pair:
    """P and D, everything on its way between them, and D's queues.

    `loaded_first`: waiting requests with blocks are tried before those without, as from 0.31 on.
    """

    requests: list[Request]
    num_blocks: tuple[int, int]
    largest: int
    chance: random.Random
    loaded_first: bool = False
    bag: list[Callable[[], None]] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    num_early: int = 0

    def __post_init__(self) -> None:
        self.free_p, num_d = self.num_blocks
        self.free = list(range(1, num_d + 1))
        self.admission = Admission(num_d, self.largest)
        self.queue_p = [each for each in self.requests if each.kind != ON_D]
        self.chance.shuffle(self.queue_p)
        for number, request in enumerate(self.requests):
            request.name = RequestId(str(number))
            request.num_needed = request.num_prompt
            if request.kind != PULL:
                self.bag.append(lambda r=request: self.arrive(r))

    # What arrives.

    def arrive(self, request: Request) -> None:
        if request.kind == PUSH:
            self.admission.expect(request.name)
            self.bag.append(lambda: self.renew(request))
        self.waiting.append(request)

    def renew(self, request: Request) -> None:
        if request.on_p == "kept":
            self.admission.finished(request.name)

    def land(self, request: Request) -> None:
        """All of it has come; P has its blocks back."""
        request.on_p = "gone"
        self.free_p += request.num_prompt
        request.is_received = True
        self.admission.complete(request.name)

    def serve(self, request: Request) -> None:
        if request.on_p == "kept" and request.is_loading:
            request.on_p = "sent"
            self.bag.append(lambda: self.land(request))

    # What the engines do.

    def step_p(self) -> bool:
        """P computes prompts one at a time, in an order that D does not know."""
        if not self.queue_p or self.queue_p[0].num_prompt > self.free_p:
            return False
        request = self.queue_p.pop(0)
        self.free_p -= request.num_prompt
        request.on_p = "kept"
        if request.kind == PULL:
            self.bag.append(lambda: self.arrive(request))
        else:
            self.bag.append(lambda: self.renew(request))
        self.serve(request)
        return True

    def step_d(self) -> bool:
        """One pass over those that run and those that wait."""
        ran = [each for each in list(self.running) if self.go_on(each)]
        admitted: list[Request] = []
        order = (
            sorted(self.waiting, key=lambda each: not each.blocks)
            if self.loaded_first
            else [*self.waiting]
        )
        for request in order:
            if request.is_loading:
                continue
            if not request.blocks:
                num_claimed = request.num_needed if request.comes else 0
                if not self.admission.may_have_blocks(request.name, num_claimed):
                    continue
                if not self.allocate(request, request.num_needed):
                    break
                self.admission.allocated(request.name, request.blocks, request.num_needed)
                admitted.append(request)
                if request.comes:
                    self.num_early += request.on_p == "waits"
                    self.serve(request)
                    continue
            elif not self.allocate(request, request.num_needed - len(request.blocks)):
                break
            self.waiting.remove(request)
            self.running.append(request)
            ran.append(request)
        self.admission.end_step({each.name for each in ran})
        return bool(ran or admitted)

    def go_on(self, request: Request) -> bool:
        """It needs a block more, or has ended."""
        if request not in self.running:
            return False
        request.num_needed += 1
        if request.num_needed > request.num_prompt + request.num_answer:
            self.running.remove(request)
            self.free += request.blocks
            request.is_done = True
            self.admission.forget(request.name)
            return True
        while not self.allocate(request, 1):
            last = self.running.pop()
            self.free += last.blocks
            last.blocks, last.is_preempted = [], True
            self.waiting.insert(0, last)
            if last is request:
                return False
        return True

    def allocate(self, request: Request, count: int) -> bool:
        if count > len(self.free):
            return False
        request.blocks += [self.free.pop() for _ in range(count)]
        return True

    # Runs.

    def run(self) -> None:
        """Until nothing can happen; raises Stuck if somebody waits then."""
        for _ in range(_MAX_EVENTS):
            choice = self.chance.random()
            if self.bag and choice < 0.5:
                self.bag.pop(self.chance.randrange(len(self.bag)))()
            elif (self.step_p if choice < 0.75 else self.step_d)():
                continue
            elif not self.bag and not self.step_p() and not self.step_d() and not self.step_d():
                break
        waiting = [each for each in self.requests if not each.is_done]
        if waiting:
            raise Stuck(f"{len(waiting)} of {len(self.requests)} wait for ever: {waiting}")
        assert (self.free_p, len(self.free)) == self.num_blocks
        assert self.admission.num_claimed == 0


def no_rule(self: Admission, request_id: RequestId, num_blocks: int) -> bool:
    return True


def run_all(
    kinds: tuple[str, ...], num_blocks: tuple[int, int], largest: int, *, loaded_first: bool
) -> tuple[int, int]:
    """Every order that these seeds draw: how many are stuck, and how many prompts were early."""
    num_stuck = num_early = 0
    for seed in range(300):
        requests = [Request(kind, 3) for kind in kinds]
        pair = Pair(requests, num_blocks, largest, random.Random(seed), loaded_first)
        try:
            pair.run()
        except Stuck:
            num_stuck += 1
        num_early += pair.num_early
    return num_stuck, num_early


SHORT = {
    "push alone": ((PUSH,) * 6, (6, 8)),
    "pull and push": ((PULL, PUSH) * 3, (6, 8)),
    "with local ones": ((PULL, PUSH, ON_D) * 3, (6, 8)),
    "one at a time": ((PUSH, PULL) * 3, (3, 7)),
}
BOTH = pytest.mark.parametrize("loaded_first", [False, True], ids=["in order", "loaded first"])


@BOTH
@pytest.mark.parametrize("case", SHORT)
def test_all_end_whatever_comes_first(case: str, loaded_first: bool) -> None:
    kinds, num_blocks = SHORT[case]
    num_stuck, num_early = run_all(kinds, num_blocks, 4, loaded_first=loaded_first)
    assert num_stuck == 0
    assert num_early, "nobody had blocks before its prompt was computed"


@BOTH
@pytest.mark.parametrize("case", ["push alone", "pull and push", "with local ones"])
def test_without_the_rule_they_wait_for_each_other(
    case: str, loaded_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admission, "may_have_blocks", no_rule)
    kinds, num_blocks = SHORT[case]
    assert run_all(kinds, num_blocks, 4, loaded_first=loaded_first)[0]


def test_those_in_front_would_wait_for_those_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What standing back is for, where vLLM goes by the order of arrival alone."""
    monkeypatch.setattr(Admission, "complete", Admission.finished)
    kinds, num_blocks = SHORT["pull and push"]
    assert run_all(kinds, num_blocks, 4, loaded_first=False)[0]
    assert not run_all(kinds, num_blocks, 4, loaded_first=True)[0]


@settings(max_examples=600, deadline=None)
@given(
    requests=st.lists(
        st.builds(
            Request,
            kind=st.sampled_from([PUSH, PUSH, PULL, ON_D]),
            num_prompt=st.integers(1, 6),
            num_answer=st.integers(0, 4),
        ),
        min_size=1,
        max_size=10,
    ),
    num_blocks=st.tuples(st.integers(6, 14), st.integers(10, 24)),
    loaded_first=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_no_reachable_state_is_stuck(
    requests: list[Request], num_blocks: tuple[int, int], loaded_first: bool, seed: int
) -> None:
    Pair(requests, num_blocks, 10, random.Random(seed), loaded_first).run()


# The rule by itself.


def test_unfinished_prompts_leave_room_for_the_longest_request() -> None:
    admission = Admission(num_blocks=20, largest=10)
    for name in map(RequestId, "abc"):
        admission.expect(name)
    assert admission.may_have_blocks(RequestId("a"), 6)
    admission.allocated(RequestId("a"), range(1, 6), 6)
    assert admission.num_claimed == 6
    assert not admission.may_have_blocks(RequestId("b"), 5)
    assert admission.may_have_blocks(RequestId("c"), 4)
    assert admission.may_have_blocks(RequestId("a pull"), 20)
    assert admission.may_have_blocks(RequestId("b"), 0), "nothing is to come for it"
    admission.finished(RequestId("b"))
    assert admission.may_have_blocks(RequestId("b"), 5)


def test_shared_blocks_count_once_and_for_as_long_as_somebody_has_them() -> None:
    admission = Admission(num_blocks=20, largest=10)
    names = [RequestId(name) for name in "ab"]
    for name, own in zip(names, ([5], [6]), strict=True):
        admission.expect(name)
        admission.allocated(name, [1, 2, 3, *own], 4)
    assert admission.num_claimed == 5
    admission.finished(names[0])
    assert admission.num_claimed == 4
    admission.forget(names[1])
    assert admission.num_claimed == 0


@pytest.mark.parametrize("end", [Admission.finished, Admission.forget, Admission.complete])
def test_nothing_is_left_of_one_that_has_ended(end: Callable[[Admission, RequestId], None]) -> None:
    admission = Admission(num_blocks=20, largest=10)
    for number in itertools.repeat(0, 3):
        name = RequestId(str(number))
        admission.expect(name)
        assert admission.may_have_blocks(name, 8)
        admission.allocated(name, [1, 2], 8)
        assert admission.num_claimed == 8
        end(admission, name)
        end(admission, name)
        assert admission.num_claimed == 0


def test_who_has_everything_and_was_not_run_has_every_other_step() -> None:
    admission = Admission(num_blocks=20, largest=10)
    complete, short = RequestId("complete"), RequestId("short")
    admission.complete(complete)
    assert admission.may_have_blocks(short, 0)
    admission.end_step(())
    assert not admission.may_have_blocks(short, 0)
    admission.end_step(())
    assert admission.may_have_blocks(short, 0)
    admission.end_step({complete})
    assert admission.may_have_blocks(short, 0)

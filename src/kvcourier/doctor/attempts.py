"""From what instances tell to what is tried on them.

Decides which attempts are worth making, in which order, and why one is not made. Refuses to judge
what comes of them.
"""

import dataclasses
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from kvcourier.core.handshake import judge
from kvcourier.doctor import parent
from kvcourier.doctor.errands import FetchedTwice, FetchTwice, NixlTried, TryNixl
from kvcourier.doctor.facts import AnswerFacts, Facts, InstanceFacts, Role, Visit, pair_name
from kvcourier.doctor.gather import Question, ask_side_channel, read_place
from kvcourier.doctor.local import look_around
from kvcourier.doctor.pages import NotAnswered, Pages
from kvcourier.doctor.prompting import (
    block_size,
    handoff_of,
    hold_body,
    make_prompt,
    modes_of,
    try_pair,
)
from kvcourier.errors import KVCourierError

OpenRouter = Callable[[InstanceFacts, InstanceFacts], AbstractContextManager[str]]
"""Opens a router in front of this pair alone, at the URL that it gives, until the block ends."""

_START_S = 120.0
"""What importing NIXL may take, with torch, on a busy machine."""

_MAX_TOKENS_PER_CHARACTER = 2


def attempt(
    facts: Facts,
    question: Question,
    pages: Pages,
    open_router: OpenRouter,
    on_step: Callable[[str], None] = lambda what: None,
) -> Facts:
    """Try NIXL here, fetch KV from each instance, and send a prompt through each pair; blocks.

    `on_step` is told what is done next.
    """
    on_step("trying NIXL on this machine")
    backends = {name for one in facts.instances if one.told for name in one.told.about.backends}
    tried = parent.run(
        TryNixl(sorted(backends) or ["UCX"]), NixlTried, _START_S + question.timeout_s
    )
    facts = dataclasses.replace(facts, machine=look_around(), nixl=tried)
    works = tried.told is not None and not tried.told.problem
    met: list[InstanceFacts] = []
    visits: list[Visit] = []
    for one in facts.instances:
        if works:
            one = _learn_place(one, question, pages)
        met.append(one)
        if one.engine.is_ours:
            on_step(f"fetching KV from {one.name}")
            # At once: whoever fetches lets go of the prompt by which the place was learnt.
            visits.append(_visit(one, question, works))
    facts = dataclasses.replace(
        facts,
        prefill=tuple(one for one in met if one.role is Role.PREFILL),
        decode=tuple(one for one in met if one.role is Role.DECODE),
        visits=tuple(visits),
    )
    on_step("sending prompts through P and D")
    return _send_prompts(facts, question, pages, open_router)


def _learn_place(one: InstanceFacts, question: Question, pages: Pages) -> InstanceFacts:
    """The same instance, with its side channel asked, if that is known only from an answer to a
    prompt: vLLM says it nowhere else."""
    if not one.engine.is_ours or one.place is not None or not one.models or one.is_full:
        return one
    name = f"{question.own_id}-{secrets.token_hex(8)}"
    body = hold_body(one.models[0], make_prompt(0), name)
    try:
        reply = pages.post(f"{one.url}/v1/completions", body, timeout_s=question.answer_s)
    except NotAnswered:
        return one
    handoff = handoff_of(reply)
    keys = ("remote_engine_id", "remote_host", "remote_port")
    place = None if handoff is None else read_place(handoff, keys, "its answer to a prompt")
    if place is None:
        return one
    return ask_side_channel(dataclasses.replace(one, place=place, handoff=handoff), question)


def _visit(one: InstanceFacts, question: Question, nixl_works: bool) -> Visit:
    why_not = "NIXL moves no bytes here" if not nixl_works else _why_not(one)
    modes = modes_of([one])
    if why_not or not modes or one.told is None or one.place is None:
        return Visit(one, skipped=why_not or "it takes part in no mode")
    prompt = make_prompt(block_size(one))
    errand = FetchTwice(
        url=one.url,
        api_key=question.api_key,
        model=one.models[0],
        prompt=prompt,
        engine_id=one.told.offer.engine_id,
        host=one.place.host,
        port=one.place.port,
        own_id=question.own_id,
        secret_key_file=question.secret_key_file,
        peer_keys=question.peer_keys,
        own_host=question.own_host,
        modes=modes,
        tokens=_MAX_TOKENS_PER_CHARACTER * len(prompt),
        timeout_s=question.answer_s,
        handoff=None if one.handoff is None else dict(one.handoff),
    )
    allowed_s = _START_S + len(modes) * 3 * question.answer_s
    return Visit(one, parent.run(errand, FetchedTwice, allowed_s))


def _send_prompts(facts: Facts, question: Question, pages: Pages, open_router: OpenRouter) -> Facts:
    answers: list[AnswerFacts] = []
    not_tried: list[tuple[str, str]] = []
    for prefill, decode in facts.pairs:
        why_not = _why_not(prefill) or _why_not(decode) or _misfit(prefill, decode)
        if why_not:
            not_tried.append((pair_name(prefill, decode), why_not))
            continue
        shared = modes_of((prefill, decode))
        modes = [mode for mode in question.modes or shared if mode in shared]
        try:
            for url in _ways(facts, question, (prefill, decode), open_router):
                answers += [
                    try_pair(url, mode, (prefill, decode), pages, question.answer_s)
                    for mode in modes
                ]
        except KVCourierError as error:
            not_tried.append((pair_name(prefill, decode), str(error)))
    return dataclasses.replace(facts, answers=tuple(answers), not_tried=tuple(not_tried))


def _ways(
    facts: Facts,
    question: Question,
    pair: tuple[InstanceFacts, InstanceFacts],
    open_router: OpenRouter,
) -> Iterator[str]:
    """URLs of routers to this pair: one of our own, and the user's, if it has no other pair."""
    with open_router(*pair) as url:
        yield url
    router = facts.router
    if router is not None and not router.problem and len(router.instances) == 2:
        yield router.url


def _why_not(one: InstanceFacts) -> str:
    """Why nothing is tried with an instance; empty if something is."""
    if one.problem or one.health != 200 or not one.models:
        return f"{one.name} does not serve"
    if one.told is None or one.offer is None:
        return f"{one.name} has not told of itself"
    if one.is_full:
        return f"{one.name} is full"
    return ""


def _misfit(prefill: InstanceFacts, decode: InstanceFacts) -> str:
    assert prefill.told is not None and decode.told is not None
    if not set(prefill.models) & set(decode.models):
        return "they have no model in common"
    if not judge(prefill.told.offer.facts, decode.told.offer.facts).compatible:
        return "they do not fit"
    return "" if modes_of((prefill, decode)) else "they have no mode in common"

"""O6: a reference to KV that is no longer what it was is never taken for good.

vllm#52234, #47021: garbage, or another prompt's answer, with status 200.
"""

import pytest

from kvcourier.core.histories import Miss
from kvcourier.sim.engine import LoadPolicy
from kvcourier.sim.router import Ending
from worlds.scene import PULL, PUSH, SHORT, Scene, said_right, settings

PROMPT = range(24)
NUM_BLOCKS = 8
"""Of P: another prompt must take the blocks of the one before."""


def scene_with(policy):
    return Scene(
        instances={
            "p0": settings(num_blocks=NUM_BLOCKS),
            "d0": settings(policy=policy),
            # The roles belong to a transfer: in the second turn P reads D's blocks.
            "d1": settings(num_blocks=NUM_BLOCKS, policy=policy),
        }
    )


def reference(scene, holder, prompt=PROMPT, name="p-900"):
    """What a holder answers when it has computed a prompt."""
    (answer,) = wait(scene, scene.submit(holder, name, prompt, {"do_remote_decode": True}, 1))
    assert not answer.error
    return dict(answer.params)


def wait(scene, answers):
    scene.until(lambda: answers)
    return answers


def read(scene, place, params, name, prompt=PROMPT):
    (answer,) = wait(scene, scene.submit(place, name, prompt, params))
    return answer


def require_stale(scene, wanter, answer, policy, *, counted=True):
    """It came to an error or a right answer, and was noticed."""
    if policy is LoadPolicy.FAIL:
        assert answer.error
    else:
        assert not answer.error
        assert said_right(answer, PROMPT)
    if counted:
        assert scene.count(wanter, "stale_refused") == 1
    scene.world.settle()


@pytest.mark.parametrize("policy", LoadPolicy)
def test_o6_a_reference_that_was_used_before(policy):
    scene = scene_with(policy)
    params = reference(scene, "p0")
    assert said_right(read(scene, "d0", params, "d-900"), PROMPT)
    scene.advance(0.05)
    # Nothing of it is in D's prefix cache, and P's blocks are another prompt's.
    reference(scene, "p0", range(300, 328), "p-901")
    require_stale(scene, "d1", read(scene, "d1", params, "d-901"), policy)


@pytest.mark.parametrize("holder,wanter", [("p0", "d0"), ("d1", "p0")], ids=["b", "e_turn_2"])
@pytest.mark.parametrize("policy", LoadPolicy)
def test_o6_a_reference_whose_lease_has_ended(policy, holder, wanter):
    # Both engines follow the policy: where P reads in the second turn, it is the wanter.
    scene = Scene(
        instances={
            place: settings(num_blocks=NUM_BLOCKS, policy=policy) for place in ("p0", "d0", "d1")
        }
    )
    params = reference(scene, holder)
    scene.advance(SHORT.kv_lease_duration + 1.0)
    assert scene.count(holder, "leases_expired") == 1
    # The blocks are another prompt's now, and that one is held.
    reference(scene, holder, range(300, 328), "p-901")
    require_stale(scene, wanter, read(scene, wanter, params, "d-900"), policy)


@pytest.mark.parametrize("policy", LoadPolicy)
def test_o6_block_ids_out_of_range(policy):
    scene = scene_with(policy)
    params = reference(scene, "p0") | {"remote_block_ids": [[1000 + i for i in range(6)]]}
    answer = read(scene, "d0", params, "d-900")
    require_stale(scene, "d0", answer, policy, counted=False)


@pytest.mark.parametrize("policy", LoadPolicy)
def test_o6_an_unknown_hold(policy):
    scene = scene_with(policy)
    params = reference(scene, "p0") | {
        "remote_hold_id": "p0.0:1",
        "remote_request_id": "p-999",
    }
    require_stale(scene, "d0", read(scene, "d0", params, "d-900"), policy)


@pytest.mark.parametrize("policy", LoadPolicy)
def test_o6_a_reference_to_a_former_life(policy):
    scene = scene_with(policy)
    params = reference(scene, "p0")
    scene.instance("p0").kill()
    scene.instance("p0").start("engine-p0")
    # The same names mean something else in the new life.
    reference(scene, "p0", range(300, 324))
    answer = read(scene, "d0", params, "d-900")
    require_stale(scene, "d0", answer, policy, counted=False)
    if policy is LoadPolicy.FAIL:
        assert "restarted" in answer.error


@pytest.mark.parametrize("policy", LoadPolicy)
def test_o6_blocks_of_somebody_elses_prompt(policy):
    scene = scene_with(policy)
    params = reference(scene, "p0")
    secret = reference(scene, "p0", range(300, 308), "p-901")
    # The hold is one's own and stands; the blocks are another client's.
    own, other = params["remote_block_ids"][0], secret["remote_block_ids"][0]
    forged = params | {"remote_block_ids": [[*other, *own[len(other) :]]]}
    answer = read(scene, "d0", forged, "d-900")
    assert scene.count("p0", "references_refused") >= 1
    if policy is LoadPolicy.FAIL:
        assert "does not hold this KV in the blocks" in answer.error
        # It cost the hold nothing.
        assert said_right(read(scene, "d0", params, "d-902"), PROMPT)
    else:
        assert said_right(answer, PROMPT)
    scene.world.settle()


@pytest.mark.parametrize("policy", LoadPolicy)
def test_o6_a_hold_that_is_yet_to_come(policy):
    scene = scene_with(policy)
    params = reference(scene, "p0")
    forged = params | {"remote_hold_id": "p0.1:1000", "remote_request_id": "p-999"}
    before = scene.now
    require_stale(scene, "d0", read(scene, "d0", forged, "d-900"), policy)
    ended = scene.life("d0").endpoint.story("d-900")[-1]["at_unix_s"]
    asked = scene.life("d0").endpoint.story("d-900")[0]["at_unix_s"]
    assert before >= 0 and ended - asked < SHORT.handshake_timeout_s


def test_o6_a_good_reference_is_taken():
    scene = scene_with(LoadPolicy.FAIL)
    assert said_right(read(scene, "d0", reference(scene, "p0"), "d-900"), PROMPT)
    assert scene.ask(PULL, PROMPT).ending is None
    scene.advance(1.0)
    scene.finish()


# (e) as it comes about: P fetches for the second turn what D keeps of the first.

KEEP_S = 3.0


def talking_scene(num_blocks=16):
    return Scene(
        instances={
            place: settings(num_blocks=num_blocks, keep_s=KEEP_S) for place in ("p0", "d0", "d1")
        }
    )


def forget(scene, place):
    """A prompt as large as the cache comes by: nothing older is in it any more."""
    num_tokens = 4 * scene.life(place).pool.num_free
    (answer,) = wait(scene, scene.submit(place, "x-900", range(300, 300 + num_tokens - 1), {}, 1))
    assert not answer.error


@pytest.mark.parametrize("mode", [PULL, PUSH])
def test_o6_a_second_turn_fetches_the_first(mode):
    scene = talking_scene()
    # P has nothing of it any more.
    first = scene.ask(mode, PROMPT, num_turns=3, pause_s=0.5)
    scene.end(first)
    forget(scene, "p0")
    scene.until(lambda: len(scene.world.router.dispatches) == 3)
    scene.end(*scene.world.router.dispatches)
    assert all(each.ending is Ending.SERVED for each in scene.world.router.dispatches)
    assert scene.life("p0").engine.num_fetched >= 1
    scene.world.settle()


@pytest.mark.parametrize("mode", [PULL, PUSH])
def test_o6_a_second_turn_that_comes_too_late_is_computed(mode):
    scene = talking_scene()
    first = scene.ask(mode, PROMPT, num_turns=2, pause_s=KEEP_S + 0.5)
    scene.end(first)
    forget(scene, "p0")
    scene.advance(KEEP_S + 0.2)
    assert scene.count("d0", "histories_expired") == 1
    # What D kept is another prompt's by now.
    forget(scene, "d0")
    scene.until(lambda: len(scene.world.router.dispatches) == 2)
    scene.end(*scene.world.router.dispatches)
    last = scene.world.router.dispatches[-1]
    assert last.ending is Ending.SERVED, last.reason
    assert scene.life("p0").engine.misses == {Miss.NOT_HELD: 1}
    assert scene.life("p0").engine.num_fetched == 0
    refused = scene.count("d0", "registrations_refused")
    assert scene.count("p0", "stale_refused") == 1 if mode is PULL else refused == 1
    scene.world.settle()


@pytest.mark.parametrize("mode", [PULL, PUSH])
def test_o6_a_second_turn_after_the_decode_instance_was_started_anew(mode):
    scene = talking_scene()
    first = scene.ask(mode, PROMPT, num_turns=2, pause_s=0.5)
    scene.end(first)
    forget(scene, "p0")
    scene.instance("d0").kill()
    scene.instance("d0").start("engine-d0")
    scene.until(lambda: len(scene.world.router.dispatches) == 2)
    scene.end(*scene.world.router.dispatches)
    assert scene.world.router.dispatches[-1].ending is Ending.SERVED
    assert scene.life("p0").engine.misses == {Miss.RESTARTED: 1}
    scene.world.settle()

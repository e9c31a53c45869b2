"""O7: the sub-requests of one call are handed over one by one, or the call is refused.

vllm#43509, #54707, dynamo#14018: siblings shared one handoff; one was fetched, the others leaked.

The refusal belongs to the router: tests/router/test_routing.py,
test_several_sub_requests_are_refused_before_prefill. What an instance does with n > 1 is in
tests/engine/server/test_requests.py. Here: parts under one transfer id.
"""

import pytest

from worlds.scene import Scene, said_right

N_IS_3 = [tuple(range(9))] * 3
OF_LENGTHS_3_8_9 = [tuple(range(3)), tuple(range(50, 58)), tuple(range(100, 109))]


@pytest.mark.parametrize("prompts", [N_IS_3, OF_LENGTHS_3_8_9], ids=["n_is_3", "3_prompts"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_o7_each_part_is_a_transfer_of_its_own(mode, prompts):
    scene = Scene()
    info = scene.life("p0").endpoint.instance_info()
    answers = []
    for part, prompt in enumerate(prompts):
        name = {"transfer_id": "one-call", "part": part}
        held = scene.submit("p0", f"p-{900 + part}", prompt, {"do_remote_decode": True} | name, 1)
        if mode == "pull":
            scene.until(lambda held=held: held)
            params = held[0].params
        else:
            params = name | {
                "do_remote_prefill": True,
                "remote_engine_id": info["engine_id"],
                "remote_host": info["side_channel_host"],
                "remote_port": info["side_channel_port"],
            }
        answers.append(scene.submit("d0", f"d-{900 + part}", prompt, params))
    scene.until(lambda: all(answers))
    for (answer,), prompt in zip(answers, prompts, strict=True):
        assert not answer.error
        assert said_right(answer, prompt)
    scene.advance(0.1)
    assert scene.free("p0") == scene.life("p0").pool.num_blocks
    assert scene.count("p0", "leases_expired") == 0
    scene.finish()


def test_o7_a_part_that_is_used_twice_is_refused():
    from kvcourier.errors import ParamsError

    scene = Scene()
    params = {"do_remote_decode": True, "transfer_id": "one-call", "part": 1}
    scene.submit("p0", "p-0", range(9), params, 1)
    with pytest.raises(ParamsError, match="transfer_id"):
        scene.submit("p0", "p-1", range(9), params, 1)

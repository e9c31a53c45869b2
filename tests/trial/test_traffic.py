"""Logs of requests: the forms that can be read, and what is sent of them."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.bench.plan import Prompts
from kvcourier.errors import ConfigError
from kvcourier.trial.traffic import Traffic, read_traffic

REQUESTS = st.lists(
    st.tuples(st.floats(0.001, 10), st.integers(1, 50), st.integers(1, 9)), min_size=2, max_size=40
)

LOGS = {
    "kvcourier": "arrival_s,input_tokens,output_tokens\n3.5,100,7\n4,20,1\n",
    "with more columns": "model,arrival_s,input_tokens,output_tokens\nx,3.5,100,7\nx,4,20,1\n",
    "mooncake": '{"timestamp": 3500, "input_length": 100, "output_length": 7, "hash_ids": [1]}\n'
    '\n{"timestamp": 4000, "input_length": 20, "output_length": 1, "hash_ids": [1]}\n',
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 23:59:59.8000000,100,7\n2023-11-17 00:00:00.3000000,20,1\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "3.5,ChatGPT,100,7,107,Conversation log\n4,GPT-4,20,1,21,API log\n",
    "out of order": "arrival_s,input_tokens,output_tokens\n4,20,1\n3.5,100,7\n",
}


def made(requests: list[tuple[float, int, int]]) -> Traffic:
    arrivals = list(itertools.accumulate(gap for gap, _, _ in requests))
    return Traffic(
        tuple(at - arrivals[0] for at in arrivals),
        tuple(tokens for _, tokens, _ in requests),
        tuple(tokens for _, _, tokens in requests),
    )


@pytest.mark.parametrize("text", LOGS.values(), ids=LOGS)
def test_every_form_of_log_says_the_same(text: str) -> None:
    traffic = read_traffic(text, "log")
    assert traffic.arrivals_s == (0, pytest.approx(0.5))
    assert (traffic.input_tokens, traffic.output_tokens) == ((100, 20), (7, 1))
    assert traffic.qps == pytest.approx(2)
    assert traffic.mean_input_tokens == 60


def test_requests_without_an_answer_are_left_out_and_counted() -> None:
    text = "arrival_s,input_tokens,output_tokens\n0,10,3\n1,10,0\n2,10,3\n"
    traffic = read_traffic(text, "log")
    assert (len(traffic), traffic.num_unanswered) == (2, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "at least 2 answered requests .* found 0"),
        ("arrival_s,input_tokens\n1,2\n", "expected the columns arrival_s, .* found arrival_s, i"),
        ("arrival_s,input_tokens,output_tokens\n1,5,5\n", "found 1"),
        ("arrival_s,input_tokens,output_tokens\n1,5,5\n1,5,5\n", "time between them"),
        ("arrival_s,input_tokens,output_tokens\nx,5,5\n", "line 2: arrival_s: .* found 'x'"),
        ("arrival_s,input_tokens,output_tokens\nnan,5,5\n", "line 2: arrival_s: .* found 'nan'"),
        ("arrival_s,input_tokens,output_tokens\n1,5,5\n2,0,5\n", "line 3: input_tokens: .* 0"),
        ("arrival_s,input_tokens,output_tokens\n1,5,-1\n", "output_tokens: .* found -1"),
        ("arrival_s,input_tokens,output_tokens\n1,5\n", "output_tokens: .* found ''"),
        ("arrival_s,input_tokens,output_tokens\n1,99999999,5\n", "10,000,000 tokens"),
        ('{"timestamp": 1}\n', "found timestamp"),
        ('{"timestamp": 1, "input_length": [1], "output_length": 1}\n', "input_length: .*\\[1\\]"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n{\n', "line 2: .* JSON object"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_traffic(text, "log")


@given(REQUESTS, st.integers(1, 50))
def test_parts_follow_each_other_through_the_log(
    requests: list[tuple[float, int, int]], count: int
) -> None:
    traffic = made(requests)
    num_parts = max(1, len(traffic) // count)
    sent = [index for number in range(num_parts) for index in traffic.part(number, count, 1.0)[0]]
    assert sent == list(range(len(sent)))
    assert len(sent) > len(traffic) - count
    assert traffic.part(num_parts, count, 1.0) == traffic.part(0, count, 1.0)


@given(REQUESTS, st.floats(0.1, 50))
def test_another_rate_stretches_time_and_keeps_its_proportions(
    requests: list[tuple[float, int, int]], qps: float
) -> None:
    traffic = made(requests)
    _, own = traffic.part(0, len(traffic), traffic.qps)
    _, other = traffic.part(0, len(traffic), qps)
    assert own == pytest.approx(traffic.arrivals_s)
    assert (len(other) - 1) / other[-1] == pytest.approx(qps)
    for one, stretched in zip(own, other, strict=True):
        assert stretched * qps == pytest.approx(one * traffic.qps)


@given(REQUESTS, st.integers(0, 5))
def test_a_burst_has_the_lengths_of_the_log(
    requests: list[tuple[float, int, int]], number: int
) -> None:
    traffic = made(requests)

    def prompts(length: int) -> Prompts:
        return Prompts(1, length, "all", 256)

    burst = traffic.burst(prompts, number, 3, 2.0)
    chosen, arrivals_s = traffic.part(number, 3, 2.0)
    assert [len(each.prompts.prompt(each.name)) for each in burst] == [
        traffic.input_tokens[index] for index in chosen
    ]
    assert [each.output_tokens for each in burst] == [traffic.output_tokens[i] for i in chosen]
    assert tuple(each.arrival_s for each in burst) == arrivals_s
    assert len({each.name for each in burst}) == len(burst)


def test_a_log_of_our_own_form_is_read_as_json_as_well() -> None:
    lines = [
        json.dumps({"arrival_s": at, "input_tokens": 5, "output_tokens": 2}) for at in (0.25, 1)
    ]
    assert read_traffic("\n".join(lines), "log").arrivals_s == (0, 0.75)

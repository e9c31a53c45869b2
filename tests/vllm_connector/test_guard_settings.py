"""The keys of `kv_connector_extra_config` that guard an instance."""

import pytest

from kvcourier.errors import ConfigError
from kvcourier.vllm_connector.settings import _allowed_peers, _flag, _path


def test_without_a_list_everybody_is_allowed_and_an_empty_one_allows_nobody():
    assert _allowed_peers({}) is None
    nobody = _allowed_peers({"allowed_peers": []})
    assert nobody is not None
    assert not nobody.allows("127.0.0.1", 5600)


def test_a_list_allows_what_it_names():
    allowed = _allowed_peers({"allowed_peers": ["p1", "10.0.0.0/8"]})
    assert allowed is not None
    assert allowed.allows("10.1.2.3", 1)
    assert not allowed.allows("p2", 1)


@pytest.mark.parametrize("entries", ["p1", [1], [""], {"p1": 1}, ["a:b:c"], True])
def test_what_is_no_list_stops_the_start_by_name(entries):
    with pytest.raises(ConfigError, match=r"^kv_connector_extra_config\.allowed_peers: expected"):
        _allowed_peers({"allowed_peers": entries})


@pytest.mark.parametrize("key", ["side_channel_key", "side_channel_peer_keys"])
@pytest.mark.parametrize("value", [1, "", ["keys"], True])
def test_what_is_no_path_stops_the_start_by_name(key, value):
    with pytest.raises(ConfigError, match=rf"^kv_connector_extra_config\.{key}: expected a path"):
        _path({key: value}, key)


@pytest.mark.parametrize("default", [True, False])
def test_whether_stories_are_told_follows_the_keys_unless_it_is_said(default):
    assert _flag({}, "tell_stories", default) is default
    assert _flag({"tell_stories": not default}, "tell_stories", default) is not default
    with pytest.raises(ConfigError, match=r"tell_stories: expected true or false, found 'yes'"):
        _flag({"tell_stories": "yes"}, "tell_stories", default)

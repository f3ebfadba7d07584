import pytest

from longarc.config.engine import EngineConfig
from longarc.config.loader import validated
from longarc.config.routing import RoutingConfig
from longarc.errors import ConfigError


@pytest.mark.parametrize(
    "address", ["http://10.0.0.1:8100", "https://engine-1.rack", "http://[::1]:8000", "http://a"]
)
def test_addresses_of_servers_are_taken(address):
    assert EngineConfig(servers=(address,)).servers == (address,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"servers": ["10.0.0.1:8100"]}, "not the address of an engine server"),
        ({"servers": ["http://a:8100/v1"]}, "without a path"),
        ({"servers": ["http://user@a:8100"]}, "not the address"),
        ({"servers": ["http://a", "http://b", "http://a"]}, "stands there twice"),
        ({"routing": {"heartbeat_s": 2.0}}, "no effect without servers"),
        ({"servers": ["http://a"], "routing": {"load_factor": 1.0}}, "greater than 1"),
        (
            {"servers": ["http://a"], "routing": {"retry_after_s": 60.0}},
            "max_retry_after_s=30 is less than retry_after_s=60",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        validated(EngineConfig, settings, source="here")


def test_routing_may_be_spelt_out_where_it_is_what_it_would_be():
    assert EngineConfig(routing=RoutingConfig()).servers == ()

"""Tests; hypothesis must not judge how fast this machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile("wattwatch", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wattwatch")

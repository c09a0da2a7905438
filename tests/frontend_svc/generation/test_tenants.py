import math

import pytest

from frontend_svc.generation.tenants import Allowance, Rate, Tenants
from triptych_kit.clock import FakeClock
from triptych_kit.errors import ResourceExhausted
from triptych_kit.security.identity import Identity, Role, TenantLimits


def identity(tenant: str = "a", **limits: int) -> Identity:
    return Identity("x", frozenset((Role.CLIENT,)), tenant, TenantLimits(**limits))


def test_an_allowance_refills_steadily_up_to_its_size():
    allowance = Allowance(60, now=0.0)
    assert allowance.wait_s(60, 0.0) == 0
    allowance.take(60, 0.0)
    assert allowance.wait_s(1, 0.0) == pytest.approx(1.0)
    assert allowance.wait_s(10, 4.0) == pytest.approx(6.0)
    assert allowance.wait_s(60, 1000.0) == 0
    assert math.isinf(allowance.wait_s(61, 1000.0))
    allowance.take(-5, 1000.0)
    assert allowance.wait_s(61, 1000.0) == math.inf


def test_open_requests_of_a_tenant_are_limited_for_all_its_keys():
    tenants = Tenants(FakeClock())
    with tenants.admitted(identity(max_requests=2)), tenants.admitted(identity(max_requests=2)):
        with pytest.raises(ResourceExhausted) as caught, tenants.admitted(identity(max_requests=2)):
            pass
        assert caught.value.message == "tenant a has 2 open requests, the limit is 2"
        assert (caught.value.reason, caught.value.retry_after_ms) == ("TENANT_LIMIT", 1000)
        with tenants.admitted(identity("b", max_requests=2)):
            pass
    with tenants.admitted(identity(max_requests=2)):
        pass


def test_requests_of_a_minute_are_limited():
    clock = FakeClock()
    tenants = Tenants(clock)
    for _ in range(3):
        with tenants.admitted(identity(requests_per_minute=3)):
            pass
    with pytest.raises(ResourceExhausted) as caught, tenants.admitted(identity(requests_per_minute=3)):
        pass
    assert caught.value.message == "tenant a may send 3 requests a minute"
    assert caught.value.retry_after_ms == 20_000
    clock.advance(20.0)
    with tenants.admitted(identity(requests_per_minute=3)):
        pass


def test_tokens_are_reserved_and_what_is_not_used_comes_back():
    clock = FakeClock()
    tenants = Tenants(clock)
    asking = identity(tokens_per_minute=100)
    with tenants.admitted(asking) as first:
        first.reserve(80)
        with tenants.admitted(asking) as second, pytest.raises(ResourceExhausted) as caught:
            second.reserve(50)
        assert caught.value.message == ("tenant a may use 100 tokens a minute, and this request up to 50")
        assert caught.value.retry_after_ms == 18_000
        first.settle(30)
    with tenants.admitted(asking) as third:
        third.reserve(70)
    with tenants.admitted(asking) as fourth, pytest.raises(ResourceExhausted) as caught:
        fourth.reserve(101)
    assert caught.value.retry_after_ms is None


def test_tokens_of_a_request_that_ends_before_it_is_sent_come_back():
    tenants, asking = Tenants(FakeClock()), identity(tokens_per_minute=100)
    for _ in range(3):
        with tenants.admitted(asking) as reservation:
            reservation.reserve(80)


def test_a_changed_limit_counts_from_the_next_request_on():
    tenants = Tenants(FakeClock())
    with tenants.admitted(identity(requests_per_minute=10, tokens_per_minute=100)) as reservation:
        reservation.reserve(80)
        reservation.settle(80)
    # Fewer than have been used.
    with (
        pytest.raises(ResourceExhausted, match="may send 1 requests a minute"),
        tenants.admitted(identity(requests_per_minute=1)),
    ):
        pass
    with tenants.admitted(identity(requests_per_minute=3, tokens_per_minute=200)) as reservation:
        reservation.reserve(120)
        reservation.settle(120)
    with (
        tenants.admitted(identity(tokens_per_minute=90)) as reservation,
        pytest.raises(ResourceExhausted, match="may use 90 tokens a minute"),
    ):
        reservation.reserve(1)
    with tenants.admitted(identity()) as reservation:
        reservation.reserve(10**9)


def test_a_tenant_without_limits_is_served():
    tenants = Tenants(FakeClock())
    with tenants.admitted(identity("")) as reservation:
        reservation.reserve(10**9)
        reservation.settle(0)


def test_the_rates_of_a_tenant_are_what_is_left_and_when_it_is_whole():
    clock = FakeClock()
    tenants = Tenants(clock)
    limited = identity(requests_per_minute=60, tokens_per_minute=600)
    assert tenants.rates(identity()) == {}
    assert tenants.rates(limited) == {"requests": Rate(60, 60, 0.0), "tokens": Rate(600, 600, 0.0)}
    with tenants.admitted(limited) as reservation:
        reservation.reserve(100)
        assert tenants.rates(limited) == {"requests": Rate(60, 59, 1.0), "tokens": Rate(600, 500, 10.0)}
        reservation.settle(40)
    clock.advance(2.0)
    assert tenants.rates(limited) == {"requests": Rate(60, 60, 0.0), "tokens": Rate(600, 580, 2.0)}
    assert tenants.rates(identity("b", requests_per_minute=5)) == {"requests": Rate(5, 5, 0.0)}

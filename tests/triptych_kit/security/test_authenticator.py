import base64

import pytest

from triptych_kit.errors import Unauthenticated
from triptych_kit.security.authenticator import Authenticator
from triptych_kit.security.credentials import Credentials
from triptych_kit.security.identity import UNRESTRICTED, Role

KEY = "triptych-0123456789abcdef"
ENTRIES = f"""
- {{name: alice, key: {KEY}, role: client}}
- {{name: engine-0, certificate: engine-0.example, role: engine, tenant: blue}}
- {{name: gone, certificate: gone.example, role: engine, tenant: blue, expires: 2020-01-01}}
"""


@pytest.fixture
def credentials(tmp_path):
    (tmp_path / "keys").write_text(ENTRIES)
    return Credentials(str(tmp_path / "keys"))


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer  {KEY} ", basic(f":{KEY}"), basic(f"me:{KEY}")])
def test_a_key_in_a_header(credentials, header):
    assert Authenticator(credentials, verifies_certificates=False).identify(header, []).name == "alice"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("", "NO_CREDENTIALS"),
        (KEY, "MALFORMED_CREDENTIALS"),
        ("Digest abc", "MALFORMED_CREDENTIALS"),
        ("Basic %%%", "MALFORMED_CREDENTIALS"),
        ("Basic /w==", "MALFORMED_CREDENTIALS"),
        ("Basic \u00fc", "MALFORMED_CREDENTIALS"),
        (f"Bearer {'x' * 2000}", "MALFORMED_CREDENTIALS"),
        ("Bearer wrong", "UNKNOWN_KEY"),
        ("Bearer", "UNKNOWN_KEY"),
        (basic(KEY), "UNKNOWN_KEY"),
    ],
)
def test_a_header_without_a_valid_key(credentials, header, reason):
    with pytest.raises(Unauthenticated) as caught:
        Authenticator(credentials, verifies_certificates=False).identify(header, [])
    assert caught.value.reason == reason


def test_a_certificate_by_a_name_of_an_entry(credentials):
    identity = Authenticator(credentials, verifies_certificates=True).identify("", ["x", "engine-0.example"])
    assert (identity.name, identity.roles, identity.tenant) == ("engine-0", {Role.ENGINE}, "blue")


def test_a_certificate_by_its_spiffe_id():
    uri = "spiffe://prod.example/frontend/frontend-1"
    identity = Authenticator(None, verifies_certificates=True).identify("", ["cn", uri])
    assert (identity.name, identity.roles) == (uri, {Role.FRONTEND})


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "NO_CREDENTIALS"),
        (["other.example"], "UNKNOWN_CERTIFICATE"),
        (["spiffe://prod/king/arthur"], "UNKNOWN_CERTIFICATE"),
        (["spiffe://prod/engine"], "UNKNOWN_CERTIFICATE"),
        (["spiffe://prod/engine/0/more"], "UNKNOWN_CERTIFICATE"),
        (["gone.example"], "EXPIRED_CREDENTIALS"),
    ],
)
def test_a_certificate_that_is_not_known(credentials, names, reason):
    with pytest.raises(Unauthenticated) as caught:
        Authenticator(credentials, verifies_certificates=True).identify("", names)
    assert caught.value.reason == reason


def test_names_count_only_where_certificates_are_verified(credentials):
    with pytest.raises(Unauthenticated):
        Authenticator(credentials, verifies_certificates=False).identify("", ["engine-0.example"])


def test_a_wrong_key_is_refused_beside_a_good_certificate(credentials):
    with pytest.raises(Unauthenticated):
        Authenticator(credentials, verifies_certificates=True).identify("Bearer x", ["engine-0.example"])


def test_everyone_is_unrestricted_where_nothing_is_configured():
    authenticator = Authenticator(None, verifies_certificates=False)
    assert not authenticator.needs_credentials
    assert authenticator.identify("Bearer anything", []) is UNRESTRICTED

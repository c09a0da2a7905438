import pytest

from coordinator_svc.config import CoordinatorConfig
from frontend_svc.config import FrontendConfig
from triptych_kit.config import ConfigError, load_config

FRONTEND = ("--engine=127.0.0.1:1",)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ["--host=0.0.0.0"],
            "--host 0.0.0.0 can be reached from other machines, and no credentials are needed",
        ),
        (["--host=192.0.2.1"], "--host 192.0.2.1 can be reached"),
        (["--admin-http-host=::"], "--admin-http-host :: can be reached"),
        (["--ssl-certfile=x"], "--ssl-certfile and --ssl-keyfile are needed together"),
        (["--peer-keyfile=x"], "--peer-certfile and --peer-keyfile are needed together"),
        (["--ssl-ca-certs=x"], "--ssl-ca-certs needs --ssl-certfile"),
        # TLS alone keeps no caller out.
        (["--host=0.0.0.0", "--ssl-certfile=x", "--ssl-keyfile=y"], "--host 0.0.0.0 can be reached"),
    ],
)
def test_what_does_not_go_together(argv: list[str], error: str):
    for kind, required, service in (
        (FrontendConfig, FRONTEND, "frontend"),
        (CoordinatorConfig, (), "coordinator"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(kind, [*argv, *required], service=service, env={})
        assert error in str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        ["--insecure"],
        ["--api-keys=x"],
        ["--ssl-certfile=x", "--ssl-keyfile=y", "--ssl-ca-certs=z"],
        ["--uds=/run/x.sock"],
    ],
)
def test_what_lets_a_service_listen_for_others(more: list[str]):
    load_config(CoordinatorConfig, ["--host=0.0.0.0", *more], service="coordinator", env={})


def test_a_key_of_the_environment_is_for_clients_of_a_frontend_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRIPTYCH_API_KEY", "triptych-0123456789abcdef")
    argv = ["--host=0.0.0.0"]
    config = load_config(FrontendConfig, [*argv, *FRONTEND], service="frontend", env={}).config
    (entry,) = config.client_keys
    assert {str(role) for role in entry.identity.roles} == {"client"}
    with pytest.raises(ConfigError):
        load_config(CoordinatorConfig, argv, service="coordinator", env={})
    monkeypatch.setenv("TRIPTYCH_API_KEY", "short")
    with pytest.raises(ConfigError, match="TRIPTYCH_API_KEY: key has 5 characters, the least is 16"):
        load_config(FrontendConfig, [*FRONTEND], service="frontend", env={})

"""Hidden states of a request's positions: every output asks for them where the client does."""

from __future__ import annotations

from tests.frontend_svc.options.asking import model_of, prepared


async def test_every_output_asks_for_them_where_the_client_does():
    asked = (await prepared(model_of(), n=2, temperature=1.0, return_hidden_states=True)).entries
    assert [entry.return_hidden_states for entry in asked] == [True, True]
    assert not any(entry.return_hidden_states for entry in (await prepared(model_of())).entries)

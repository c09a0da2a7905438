"""Hidden states and routed experts: every output asks for them where the client does."""

from __future__ import annotations

import pytest

from tests.frontend_svc.options.asking import model_of, prepared


@pytest.mark.parametrize("name", ["return_hidden_states", "return_routed_experts"])
async def test_every_output_asks_for_them_where_the_client_does(name: str):
    asked = (await prepared(model_of(), n=2, temperature=1.0, **{name: True})).entries
    assert [getattr(entry, name) for entry in asked] == [True, True]
    assert not any(getattr(entry, name) for entry in (await prepared(model_of())).entries)

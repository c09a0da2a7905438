"""What lives as long as the process is not looked at by the collector."""

from __future__ import annotations

import gc

from engine_svc.process.run import calm_collector


def test_what_is_alive_is_frozen_until_it_is_given_back():
    threshold = gc.get_threshold()
    try:
        calm_collector()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
    assert gc.get_freeze_count() == 0

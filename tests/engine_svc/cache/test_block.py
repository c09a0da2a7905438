"""The free list (behaviour 62): order, O(1) removal, and refusal of what would corrupt it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.cache.block import Block, FreeList


def _ids(free: FreeList) -> list[int]:
    return [block.block_id for block in free]


def _list_of(num_blocks: int) -> tuple[list[Block], FreeList]:
    blocks = [Block(block_id) for block_id in range(num_blocks)]
    return blocks, FreeList(blocks)


def test_62_blocks_are_taken_from_the_front():
    _, free = _list_of(5)
    assert free.pop_first().block_id == 0
    assert _ids(free) == [1, 2, 3, 4]
    assert len(free) == 4


def test_62_a_block_is_removed_from_the_middle_and_comes_back_at_the_end():
    blocks, free = _list_of(5)
    free.remove(blocks[2])
    assert (_ids(free), len(free)) == ([0, 1, 3, 4], 4)
    free.append([blocks[2]])
    assert (_ids(free), len(free)) == ([0, 1, 3, 4, 2], 5)


def test_62_the_first_and_the_last_are_removed_like_any_other():
    blocks, free = _list_of(3)
    free.remove(blocks[0])
    free.remove(blocks[2])
    assert (_ids(free), len(free)) == ([1], 1)
    free.remove(blocks[1])
    assert (_ids(free), len(free)) == ([], 0)
    free.prepend([blocks[2]])
    free.prepend([blocks[0]])
    assert (_ids(free), len(free)) == ([0, 2], 2)


def test_62_links_are_set_exactly_while_a_block_is_free():
    blocks, free = _list_of(2)
    assert free.pop_first() is blocks[0]
    assert blocks[0].previous is blocks[0].next is None
    assert blocks[1].previous is not None
    assert blocks[1].next is not None


def test_62_appended_blocks_go_to_the_end_in_their_order():
    blocks, free = _list_of(5)
    free.remove(blocks[1])
    free.remove(blocks[0])
    free.append([blocks[1], blocks[0]])
    assert _ids(free) == [2, 3, 4, 1, 0]


def test_62_prepended_blocks_go_to_the_front_in_their_order():
    blocks, free = _list_of(5)
    free.remove(blocks[3])
    free.remove(blocks[4])
    free.prepend([blocks[4], blocks[3]])
    assert _ids(free) == [4, 3, 0, 1, 2]


def test_62_taking_from_an_empty_list_raises():
    _, free = _list_of(1)
    free.pop_first()
    with pytest.raises(IndexError, match="No free blocks available"):
        free.pop_first()


def test_62_removing_a_block_that_is_not_free_raises():
    blocks, free = _list_of(2)
    free.remove(blocks[0])
    with pytest.raises(ValueError, match="block 0 is not on the free list"):
        free.remove(blocks[0])


@pytest.mark.parametrize("num_times", [1, 2])
def test_62_a_block_cannot_be_free_twice(num_times: int):
    blocks, free = _list_of(3)
    if num_times == 2:
        free.remove(blocks[1])
    with pytest.raises(ValueError, match="block 1 is already on the free list"):
        free.append([blocks[1]] * num_times)


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(st.data())
def test_62_it_behaves_like_a_list(data: st.DataObject):
    blocks, free = _list_of(8)
    model = list(range(8))
    for _ in range(30):
        outside = [block_id for block_id in range(8) if block_id not in model]
        operation = data.draw(st.sampled_from(["pop", "remove", "append", "prepend"]))
        if operation == "pop" and model:
            assert free.pop_first().block_id == model.pop(0)
        elif operation == "remove" and model:
            block_id = data.draw(st.sampled_from(model))
            free.remove(blocks[block_id])
            model.remove(block_id)
        elif operation in ("append", "prepend") and outside:
            chosen = data.draw(st.lists(st.sampled_from(outside), unique=True))
            added = [blocks[block_id] for block_id in chosen]
            if operation == "append":
                free.append(added)
                model = model + chosen
            else:
                free.prepend(added)
                model = chosen + model
        assert _ids(free) == model
        assert len(free) == len(model)

"""Programs of native kernels: what runs, in which order, and what is refused."""

from __future__ import annotations

import pytest
import torch

from triptych_kernels.cpu.loader import Isa
from triptych_kernels.cpu.program import Program

TAKEN = torch.tensor([2, 0, 2])


def take_rows_twice(isa: Isa) -> Program:
    """Takes rows of [3, 4] bytes into a buffer, and rows of that into another."""
    program = Program(isa, ["from", "between", "to", "taken", "count"])
    for source, target in (("from", "between"), ("between", "to")):
        named = program.register
        program.add("take_rows", named(source), 3, 4, named("taken"), named("count"), named(target))
    program.finish()
    return program


def test_kernels_run_one_after_the_other_with_each_runs_numbers(isa: Isa) -> None:
    program = take_rows_twice(isa)
    for first in (0, 100):
        x = torch.arange(first, first + 12, dtype=torch.uint8).view(3, 4)
        between, out = torch.zeros_like(x), torch.zeros_like(x)
        program.run(x.data_ptr(), between.data_ptr(), out.data_ptr(), TAKEN.data_ptr(), 3)
        assert torch.equal(between, x[TAKEN])
        assert torch.equal(out, x[TAKEN][TAKEN])


@pytest.mark.parametrize("at_once", [1, 2, 3, 5, 100])
def test_over_rows_all_kernels_run_before_the_next_rows(isa: Isa, at_once: int) -> None:
    program = Program(isa, ["from", "taken", "count", "at_once", "between", "first", "to"])
    named = program.register
    with program.over_rows(named("count"), named("at_once")):
        taken, to = named("taken").by_row(8), named("to").by_row(4)
        # The buffer between is for the rows at hand alone.
        program.add("take_rows", named("from"), 6, 4, taken, named("count"), named("between"))
        program.add("take_rows", named("between"), named("count"), 4, named("first"), named("count"), to)
    program.add("take_rows", named("to"), 5, 4, named("first"), 1, named("from"))
    program.finish()
    x = torch.arange(24, dtype=torch.uint8).view(6, 4)
    expected, taken_rows = x.clone(), torch.tensor([5, 1, 4, 0, 2])
    between, out = torch.zeros(min(at_once, 5), 4, dtype=torch.uint8), torch.zeros(5, 4, dtype=torch.uint8)
    first = torch.arange(5)
    addresses = [tensor.data_ptr() for tensor in (between, first, out)]
    program.run(x.data_ptr(), taken_rows.data_ptr(), 5, at_once, *addresses)
    assert torch.equal(out, expected[taken_rows])
    # What is added behind runs once, with all rows done.
    assert torch.equal(x[0], out[0])


def test_rows_that_there_are_none_of_take_no_kernel(isa: Isa) -> None:
    program = Program(isa, ["count", "at_once"])
    with program.over_rows(program.register("count"), program.register("at_once")):
        program.add("take_rows", 0, 0, 4, 0, program.register("count"), 0)
    program.finish()
    program.run(0, 4)


def test_an_error_of_a_kernel_is_its_own_and_ends_the_run(isa: Isa) -> None:
    program = take_rows_twice(isa)
    x = torch.ones(3, 4, dtype=torch.uint8)
    between, out = torch.zeros_like(x), torch.zeros_like(x)
    behind = torch.tensor([0, 1, 3])
    with pytest.raises(IndexError, match="a row to take is not below 3"):
        program.run(x.data_ptr(), between.data_ptr(), out.data_ptr(), behind.data_ptr(), 3)
    assert not between.any()
    assert not out.any()


def test_what_does_not_fit_is_refused_before_anything_runs(isa: Isa) -> None:
    program = take_rows_twice(isa)
    with pytest.raises(TypeError, match="run_program takes 5 numbers, got 2"):
        program.run(1, 2)
    with pytest.raises(TypeError):
        program.run("from", 0, 0, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="no_kernel"):
        program.add("no_kernel")
    with pytest.raises(KeyError, match="nowhere"):
        program.register("nowhere")
    short = Program(isa, [])
    short.add("take_rows", 1, 2)
    with pytest.raises(TypeError, match="take_rows takes 6 numbers, got 2"):
        short.finish()
    other = Program(isa, [])
    other.add("linear", 12345, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="PyCapsule"):
        other.finish()
    foreign = Program(isa, [])
    foreign.add("take_rows", program.register("count"), 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="register 4 is not below 0"):
        foreign.finish()
    counted = Program(isa, [])
    with counted.over_rows(program.register("count"), program.register("count")):
        pass
    with pytest.raises(ValueError, match="register 4 is not below 0"):
        counted.finish()

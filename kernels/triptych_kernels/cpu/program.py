"""Programs of native kernels: many calls in one, built once and run in every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from triptych_kernels.cpu.loader import Isa, native_module

_NO_REGISTER = -1


@dataclass(frozen=True, slots=True)
class Register:
    """A number that is passed to each run.

    row_bytes: for an address, how far it advances per row that was processed before the current ones.
    """

    index: int
    row_bytes: int = 0

    def by_row(self, row_bytes: int) -> Register:
        """The address of the first of the current rows, in `Program.over_rows`."""
        return Register(self.index, row_bytes)


class Program:
    """Kernels that run one after the other; arithmetic and arguments are in the .cpp files.

    It keeps no tensor and no plan alive: its owner holds everything whose address it contains.
    """

    def __init__(self, isa: Isa, registers: Sequence[str]) -> None:
        """registers: names, in the order of the numbers of `run`.  isa: the kernels' instruction set."""
        self._addresses = isa.native.addresses
        self._registers = {name: Register(index) for index, name in enumerate(registers)}
        self._parts: list[tuple[int, int, list[object]]] = [(_NO_REGISTER, _NO_REGISTER, [])]
        self._made: object = None
        self._run = native_module().run_program

    def register(self, name: str) -> Register:
        """The register of that name. KeyError if there is none."""
        return self._registers[name]

    def add(self, kernel: str, *arguments: object) -> None:
        """Append a kernel with its function's arguments; registers for numbers that vary between runs."""
        registers = [each if isinstance(each, Register) else Register(_NO_REGISTER) for each in arguments]
        register_indexes, row_bytes = (
            tuple(each.index for each in registers),
            tuple(each.row_bytes for each in registers),
        )
        self._parts[-1][2].append((self._addresses[kernel], arguments, register_indexes, row_bytes))

    @contextmanager
    def over_rows(self, count: Register, at_once: Register) -> Iterator[None]:
        """Kernels added inside run for `at_once` rows at a time, all kernels before the next rows.

        There are `count` rows. As an argument of a kernel, `count` is the number of current rows.
        """
        self._parts.append((count.index, at_once.index, []))
        yield
        self._parts.append((_NO_REGISTER, _NO_REGISTER, []))

    def finish(self) -> None:
        """Build the program. TypeError or ValueError for wrong arguments of a kernel."""
        self._made = native_module().make_program(len(self._registers), self._parts)

    def run(self, *numbers: int) -> None:
        """Run all kernels with these numbers in the registers, without the interpreter's lock.

        An error of a kernel is raised as its own function raises it, and ends the run.
        """
        self._run(self._made, *numbers)

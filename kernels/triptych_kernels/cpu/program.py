"""Programs of native kernels: many calls in one, made once and run every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych_kernels.cpu.loader import Isa, native_module


@dataclass(frozen=True, slots=True)
class Register:
    """A number that each run is told."""

    index: int


class Program:
    """Kernels that run one after the other; the arithmetic, and what each is told, is in the .cpp files.

    It keeps no tensor and no plan: whoever makes it holds all that its numbers are addresses of.
    """

    def __init__(self, isa: Isa, registers: Sequence[str]) -> None:
        """registers: names, in the order in which `run` takes their numbers.  isa: whose kernels run."""
        self._addresses = isa.native.addresses
        self._registers = {name: Register(index) for index, name in enumerate(registers)}
        self._steps: list[tuple[int, tuple[object, ...], tuple[int, ...]]] = []
        self._made: object = None
        self._run = native_module().run_program

    def register(self, name: str) -> Register:
        """The register of that name. KeyError where there is none."""
        return self._registers[name]

    def add(self, kernel: str, *arguments: object) -> None:
        """Append a kernel with what its function in the module takes; registers where numbers vary."""
        places = tuple(each.index if isinstance(each, Register) else -1 for each in arguments)
        self._steps.append((self._addresses[kernel], arguments, places))

    def finish(self) -> None:
        """Make what runs. TypeError, ValueError where a kernel takes other arguments."""
        self._made = native_module().make_program(len(self._registers), self._steps)
        self._steps = []

    def run(self, *numbers: int) -> None:
        """Run all kernels with these numbers in the registers, without the interpreter's lock.

        An error of a kernel is raised as its own function raises it, and ends the run.
        """
        self._run(self._made, *numbers)

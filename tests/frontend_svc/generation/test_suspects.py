"""Who may go where after an engine died, and who may go nowhere any more."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from frontend_svc.generation.suspects import Suspect, Suspects, Turn, in_order
from frontend_svc.output.loss import LossKind

DEATH = LossKind.DEATH


def after_death(
    suspects: Suspects, *, num_fresh: int = 0, num_begun: int = 0, address: str = "a"
) -> list[Suspect]:
    """The requests of an engine that died with them, those that had begun first."""
    lost = [Suspect() for _ in range(num_begun + num_fresh)]
    for index, suspect in enumerate(lost):
        assert not suspects.lose(suspect, address, DEATH, had_output=index < num_begun)
    return lost


def send_all(suspects: Suspects, waiting: list[Suspect], address: str) -> list[Suspect]:
    """Send as many as may go now, in order; returns them."""
    sent = []
    for suspect in in_order(waiting):
        if suspects.may_go(suspect, address):
            suspects.send(suspect, address)
            sent.append(suspect)
    for suspect in sent:
        waiting.remove(suspect)
    suspects.settle()
    return sent


def test_requests_without_output_go_one_at_a_time_for_each_engine():
    suspects = Suspects()
    waiting = after_death(suspects, num_fresh=3)
    (first,) = send_all(suspects, waiting, "b")
    assert len(send_all(suspects, waiting, "c")) == 1
    assert send_all(suspects, waiting, "b") == []
    suspects.clear(first)
    assert len(send_all(suspects, waiting, "b")) == 1


def test_those_that_had_begun_go_before_them_in_groups_that_double():
    suspects = Suspects()
    waiting = after_death(suspects, num_begun=9, num_fresh=2)
    sizes, turns = [], []
    while waiting:
        sent = send_all(suspects, waiting, "b")
        assert send_all(suspects, waiting, "b") == []
        for suspect in sent[1:]:
            suspects.clear(suspect)
            assert send_all(suspects, waiting, "b") == []
        turns += [suspect.turn for suspect in sent[:1]]
        suspects.clear(sent[0])
        sizes.append(len(sent))
    assert sizes == [1, 2, 4, 2, 1, 1]
    assert turns == [Turn.IN_GROUP] * 4 + [Turn.ALONE] * 2


def test_the_one_suspect_of_two_dead_engines_is_quarantined_and_no_other():
    suspects = Suspects()
    waiting = after_death(suspects, num_fresh=2)
    (first,) = send_all(suspects, waiting, "b")
    others = [Suspect(), Suspect()]
    assert suspects.lose(first, "b", DEATH, had_output=False)
    assert not any(suspects.lose(other, "b", DEATH, had_output=True) for other in others)
    assert (first.num_deaths, others[0].num_deaths) == (2, 1)


def test_of_several_suspects_none_is_quarantined_and_each_goes_alone():
    suspects = Suspects()
    waiting = after_death(suspects, num_begun=3)
    (first,) = send_all(suspects, waiting, "b")
    suspects.clear(first)
    both = send_all(suspects, waiting, "b")
    assert len(both) == 2
    assert not any(suspects.lose(suspect, "b", DEATH, had_output=False) for suspect in both)
    assert {suspect.turn for suspect in both} == {Turn.ALONE}
    (alone,) = send_all(suspects, both, "c")
    assert suspects.lose(alone, "c", DEATH, had_output=False)


def test_output_clears_a_request_whatever_it_was_present_at():
    suspects = Suspects()
    (suspect,) = after_death(suspects, num_fresh=1)
    suspects.send(suspect, "b")
    suspects.clear(suspect)
    assert (suspect.turn, suspect.num_deaths) == (Turn.AT_ONCE, 0)
    assert not suspects.lose(suspect, "b", DEATH, had_output=True)


@pytest.mark.parametrize("kind", [LossKind.SILENCE, LossKind.LEFT, LossKind.REFUSED])
def test_only_deaths_count(kind):
    suspects = Suspects()
    innocent, (suspect,) = Suspect(), after_death(suspects, num_fresh=1)
    suspects.send(suspect, "b")
    assert not suspects.lose(innocent, "b", kind, had_output=False)
    assert not suspects.lose(suspect, "b", kind, had_output=False)
    assert (innocent.turn, innocent.num_deaths) == (Turn.AT_ONCE, 0)
    assert (suspect.turn, suspect.num_deaths, suspects.num_unproven) == (Turn.ALONE, 1, 0)


def test_who_yields_nothing_for_long_lets_others_pass_and_stays_a_suspect():
    suspects = Suspects()
    waiting = after_death(suspects, num_fresh=2)
    (slow,) = send_all(suspects, waiting, "b")
    suspects.pass_over(slow)
    (other,) = send_all(suspects, waiting, "b")
    assert not suspects.lose(slow, "b", DEATH, had_output=False)
    assert not suspects.lose(other, "b", DEATH, had_output=False)


def test_one_that_ends_gives_its_place_to_the_next():
    suspects = Suspects()
    waiting = after_death(suspects, num_fresh=2)
    (first,) = send_all(suspects, waiting, "b")
    suspects.clear(first)
    assert len(send_all(suspects, waiting, "b")) == 1


class World:
    """Engines that die of the prefill of one request and are back a while later, and requests that go on."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.suspects = Suspects()
        self.engines: dict[str, list[Suspect]] = {
            f"engine-{index}": [] for index in range(self.chance.randrange(1, 5))
        }
        self.down: dict[str, int] = {}
        self.num_left: dict[Suspect, int] = {}  # steps until the first output, then until the end
        self.has_output: dict[Suspect, bool] = {}
        self.waiting: deque[Suspect] = deque()
        self.poison = Suspect()
        self.quarantined: list[Suspect] = []
        self.done: list[Suspect] = []
        self.num_deaths = 0

    def arrive(self, suspect: Suspect) -> None:
        self.num_left[suspect] = self.chance.randrange(1, 30)
        self.waiting.append(suspect)

    def turn(self) -> None:
        for address in [address for address, turns in self.down.items() if turns == 0]:
            del self.down[address]
        self.down = {address: turns - 1 for address, turns in self.down.items()}
        self.dispatch()
        for address in list(self.engines):
            if address not in self.down:
                self.step(address)

    def dispatch(self) -> None:
        for suspect in in_order(self.waiting):
            up = [address for address in self.engines if address not in self.down]
            free = [address for address in up if self.suspects.may_go(suspect, address)]
            if free:
                address = self.chance.choice(free)
                self.waiting.remove(suspect)
                self.suspects.send(suspect, address)
                self.has_output[suspect] = False
                self.engines[address].append(suspect)
        self.suspects.settle()

    def step(self, address: str) -> None:
        scheduled = [one for one in self.engines[address] if self.chance.random() < 0.7]
        if self.poison in scheduled:
            self.die(address)
            return
        for suspect in scheduled:
            if not self.has_output[suspect]:
                self.has_output[suspect] = True
                self.suspects.clear(suspect)
            self.num_left[suspect] -= 1
            if not self.num_left[suspect]:
                self.engines[address].remove(suspect)
                self.suspects.clear(suspect)
                self.done.append(suspect)

    def die(self, address: str) -> None:
        lost, self.engines[address] = self.engines[address], []
        self.down[address] = self.chance.randrange(3, 30)
        self.num_deaths += 1
        self.chance.shuffle(lost)
        for suspect in lost:
            if self.suspects.lose(suspect, address, DEATH, had_output=self.has_output[suspect]):
                self.quarantined.append(suspect)
            else:
                self.waiting.append(suspect)


@pytest.mark.parametrize("first_seed", range(0, 400, 50))
def test_a_request_that_kills_at_its_prefill_kills_two_engines_and_alone_is_quarantined(first_seed):
    for seed in range(first_seed, first_seed + 50):
        world = World(seed)
        innocent = [Suspect() for _ in range(world.chance.randrange(1, 64))]
        poison_at = world.chance.randrange(40)
        late = [one for one in innocent if world.chance.random() < 0.3]
        for suspect in innocent:
            if suspect not in late:
                world.arrive(suspect)
        for turn in range(3000):
            if turn == poison_at:
                world.arrive(world.poison)
            if late and world.chance.random() < 0.3:
                world.arrive(late.pop())
            world.turn()
        assert world.num_deaths <= 2, seed
        assert world.quarantined == [world.poison], seed
        assert set(world.done) == set(innocent), seed
        assert world.suspects.num_unproven == 0, seed

"""What accounts get of something that they want more of than there is. Knows no clock and no identities."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_T = TypeVar("_T")

# Accounts of which something is remembered that have nothing in use.
_MAX_REMEMBERED = 1024
# A task that occupies a worker for longer makes its account a slow one for a while. Most take a few ms.
SLOW_S = 0.1
_MEMORY_S = 60.0


@dataclass(slots=True)
class _Held:
    """An account's part of a shared limit."""

    amount: int
    weight: int


class SharedLimit:
    """A limit on an amount that accounts hold together.

    Up to `limit` every account gets what it asks for. Above it an account gets more only while it holds less
    than its share: the limit divided among the accounts that hold something, by their weights. So one that
    holds all of it keeps no other from its share. All together never hold more than twice the limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._total = 0
        self._sum_weights = 0
        self._held: dict[str, _Held] = {}

    @property
    def total(self) -> int:
        return self._total

    @property
    def num_accounts(self) -> int:
        """Those that hold something."""
        return len(self._held)

    def share(self, account: str, weight: int) -> int:
        """What `account` is sure to get beside those that hold something now; at least 1."""
        held = self._held.get(account)
        others = self._sum_weights - (0 if held is None else held.weight)
        return max(1, self.limit * weight // (others + weight))

    def has_room(self, account: str, weight: int, amount: int = 1) -> bool:
        """Whether `account` may take `amount` more."""
        total = self._total + amount
        if total <= self.limit:
            return True
        held = self._held.get(account)
        own = amount if held is None else held.amount + amount
        return total <= 2 * self.limit and own <= self.share(account, weight)

    def take(self, account: str, weight: int, amount: int = 1) -> None:
        """Hold `amount` more, whether or not there is room."""
        if not amount:
            return
        held = self._held.setdefault(account, _Held(0, 0))
        self._sum_weights += weight - held.weight
        held.weight = weight
        held.amount += amount
        self._total += amount

    def give_back(self, account: str, amount: int = 1) -> None:
        """Hold `amount` less."""
        if not amount:
            return
        held = self._held[account]
        held.amount -= amount
        self._total -= amount
        if not held.amount:
            self._sum_weights -= held.weight
            del self._held[account]

    def words(self, account: str, weight: int) -> str:
        """The account's part, for the text of a refusal; empty where no other account holds anything."""
        held = self._held.get(account)
        if self._total == (0 if held is None else held.amount):
            return ""
        own = 0 if held is None else held.amount
        return f" (the account {account!r} has {own}, its share is {self.share(account, weight)})"


class LimitPart:
    """What one user of a `SharedLimit` holds of it, for its account."""

    def __init__(self, shared: SharedLimit, account: str, weight: int) -> None:
        self.shared, self.amount = shared, 0
        self._account, self._weight = account, weight

    def has_room(self, amount: int) -> bool:
        return self.shared.has_room(self._account, self._weight, amount)

    def add(self, amount: int) -> None:
        """Hold `amount` more, whether or not there is room; less if it is negative."""
        self.amount += amount
        if amount > 0:
            self.shared.take(self._account, self._weight, amount)
        else:
            self.shared.give_back(self._account, -amount)

    def clear(self) -> None:
        """Hold nothing any more."""
        self.add(-self.amount)

    def words(self) -> str:
        """See `SharedLimit.words`."""
        return self.shared.words(self._account, self._weight)


@dataclass(slots=True)
class _Account(Generic[_T]):
    """used: its costs, divided by its weight, since a beginning that is the same for all."""

    used: float
    weight: int
    items: deque[_T] = field(default_factory=deque)


class FairQueue(Generic[_T]):
    """Items of accounts that share a server, such as a pool of processes or a lock.

    Next is an item of the account that has used the least for its weight, in the order in which it added
    them. An account that comes, or comes again, begins with as little as the one that was served last: it
    saves nothing up, and waits for no more than what is served already. With one account the queue is FIFO.
    """

    def __init__(self) -> None:
        # Of accounts that have used equally little, the first is next; one that was served becomes the last.
        self._waiting: dict[str, _Account[_T]] = {}
        self._without_items: dict[str, _Account[_T]] = {}
        self._num_items = 0
        self._least_used = 0.0  # of the account that was served last, when it was

    def __len__(self) -> int:
        return self._num_items

    def add(self, item: _T, account: str, weight: int, *, first: bool = False) -> None:
        """Append `item` to those of `account`; with `first`, put it before them."""
        entry = self._waiting.get(account)
        if entry is None:
            entry = self._without_items.pop(account, None) or _Account(self._least_used, weight)
            entry.used = max(entry.used, self._least_used)
            self._waiting[account] = entry
        entry.weight = weight
        if first:
            entry.items.appendleft(item)
        else:
            entry.items.append(item)
        self._num_items += 1

    def take(self, may_take: Callable[[str], bool] = lambda account: True) -> _T | None:
        """Remove and return the next item, of accounts that `may_take` alone."""
        chosen, least = "", None
        for account, entry in self._waiting.items():
            if (least is None or entry.used < least.used) and may_take(account):
                chosen, least = account, entry
        if least is None:
            return None
        self._least_used = max(self._least_used, least.used)
        item = least.items.popleft()
        self._waiting[chosen] = self._waiting.pop(chosen)
        self._note_removal(chosen)
        return item

    def remove(self, item: _T, account: str) -> None:
        """Remove an item of `account` that was not taken."""
        self._waiting[account].items.remove(item)
        self._note_removal(account)

    def charge(self, account: str, cost: float) -> None:
        """Add to what `account` has used; a negative cost is given back."""
        entry = self._waiting.get(account) or self._without_items.get(account)
        if entry is not None:
            entry.used += cost / entry.weight

    def _note_removal(self, account: str) -> None:
        self._num_items -= 1
        if self._waiting[account].items:
            return
        if len(self._without_items) >= _MAX_REMEMBERED:
            self._forget_some()
        self._without_items[account] = self._waiting.pop(account)

    def _forget_some(self) -> None:
        """Forget accounts without items: those that begin anew anyhow; if there are none, all."""
        used = {name: entry.used for name, entry in self._without_items.items()}
        for name in [name for name in used if used[name] <= self._least_used] or used:
            del self._without_items[name]


class SlowAccounts:
    """Which accounts have had a task of more than `SLOW_S` in the last minute, beside which others."""

    def __init__(self) -> None:
        self._slow_until: dict[str, float] = {}
        self._seen_at: dict[str, float] = {}  # the one that was not seen for longest first

    def see(self, account: str, now: float) -> None:
        """Note that `account` has sent a task."""
        self._seen_at.pop(account, None)
        self._seen_at[account] = now
        if len(self._seen_at) > _MAX_REMEMBERED:
            oldest = next(iter(self._seen_at))
            del self._seen_at[oldest]
            self._slow_until.pop(oldest, None)

    def note(self, account: str, took_s: float, now: float) -> None:
        """Note how long a task of `account` took."""
        if took_s > SLOW_S and account in self._seen_at:
            self._slow_until[account] = now + _MEMORY_S

    def is_slow(self, account: str, now: float) -> bool:
        return now < self._slow_until.get(account, 0.0)

    def others_seen(self, now: float) -> Iterator[str]:
        """Accounts that have sent a task in the last minute and are not slow."""
        for account, seen_at in self._seen_at.items():
            if seen_at > now - _MEMORY_S and not self.is_slow(account, now):
                yield account

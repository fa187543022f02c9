"""A queue in which tasks take turns, so that a large task delays a small one by one item at a time."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Waiting items by task. Tasks take turns; a task that gets a first item joins at the end of the round."""

    def __init__(self) -> None:
        self._by_task: OrderedDict[str, deque[T]] = OrderedDict()
        """In the order of the tasks' turns; no entry is empty."""

    def __len__(self) -> int:
        return sum(map(len, self._by_task.values()))

    def push(self, task: str, item: T, *, first: bool = False) -> None:
        """Add an item. `first`: put the item before the others of its task, because it waited once already."""
        items = self._by_task.setdefault(task, deque())
        if first:
            items.appendleft(item)
        else:
            items.append(item)

    def peek(self) -> tuple[str, T] | None:
        """Return the task whose turn it is and its item, or None where no item waits."""
        return next(((task, items[0]) for task, items in self._by_task.items()), None)

    def pop(self) -> tuple[str, T]:
        """Take the item whose turn it is, and move its task to the end of the round. Return task and item."""
        task, items = next(iter(self._by_task.items()))
        self._by_task.move_to_end(task)
        item = items.popleft()
        if not items:
            del self._by_task[task]
        return task, item

    def remove(self, task: str, gone: Iterable[T]) -> None:
        """Remove those of these items that wait."""
        removed = set(gone)
        if not removed:
            return
        left = deque(item for item in self._by_task.get(task, ()) if item not in removed)
        if left:
            self._by_task[task] = left
        else:
            self._by_task.pop(task, None)

"""Takes the classes of a suite and resolves them across files: bases, mixins and attributes, in Python's order.

What a method asks its class for is noted, so that a method is followed once for all classes that answer it alike.
"""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exportkit.skips.layout import Layout
from exportkit.skips.modules import Modules
from exportkit.skips.values import UNKNOWN, Bound, Class, External, Frame, Function, Instance, Skip, Skipped, Super

_SELF_ASSIGNED = re.compile(r"\b(?:self|cls)\.(\w+)\s*(?::[^=\n]+)?[-+*|&/]?=(?!=)")


@dataclass(frozen=True)
class Outcome:
    """What following a function gives: skips under a condition, and at the end one that is certain, if there is one."""

    skips: tuple[Skip, ...]


@dataclass(frozen=True)
class _Question:
    """An attribute that a method asks its class for; with ``after``, behind that class, as super() does."""

    name: str
    after: Class | None = None
    of_instance: bool = False


@dataclass
class _Answered:
    """A question, and for each answer what follows: the next question, or the outcome."""

    question: _Question
    after: dict[Any, _Answered | Outcome] = field(default_factory=dict)


class Classes(Modules):
    """The classes of a suite."""

    def __init__(self, root: Path, layout: Layout) -> None:
        super().__init__(root, layout)
        self._self_assigned: dict[int, set[str]] = {}
        self._outcomes: dict[int, _Answered | Outcome] = {}
        self._answers: dict[tuple[int, _Question], Any] = {}
        self._asked: list[tuple[_Question, Any]] = []

    def bases(self, cls: Class) -> tuple[Any, ...]:
        """Returns the base classes of a class: those of the suite, and the names of the others."""
        if not cls.bases:
            values = tuple(
                self.evaluate(base, cls.scope) for base in cls.node.bases if not isinstance(base, ast.Starred)
            )
            cls.bases = tuple(value for value in values if isinstance(value, Class | External)) or (
                External("builtins.object"),
            )
        return cls.bases

    def order(self, cls: Class) -> tuple[Any, ...]:
        """Returns the classes in the order in which Python looks for attributes (C3 linearisation)."""
        if cls.cached_order is None:
            cls.cached_order = (cls,)  # a class that is its own base has no other
            sequences = [list(self.order(base)) if isinstance(base, Class) else [base] for base in self.bases(cls)]
            cls.cached_order = (cls, *_merge([*sequences, list(self.bases(cls))]))
        return cls.cached_order

    def is_test_case(self, cls: Class) -> bool:
        """Whether a class is a ``unittest.TestCase``; a base outside the suite is one if its name says so."""
        return any(
            isinstance(base, External) and "TestCase" in base.name.rpartition(".")[2] for base in self.order(cls)
        )

    def member(self, cls: Class, name: str, after: Class | None = None) -> tuple[Any, Class] | None:
        """Returns an attribute of a class, and the class that has it; ``after`` starts behind one, as super() does."""
        order = self.order(cls)
        start = order.index(after) + 1 if after in order else 0
        for base in order[start:]:
            if isinstance(base, Class) and name in base.body.names:
                return self._Name(ast.Name(name, ast.Load()), base.body), base
        return None

    def attribute(self, value: Any, name: str) -> Any:
        """Returns an attribute of a module, class or instance, or UNKNOWN."""
        if isinstance(value, Frame):
            module = self.by_frame.get(id(value))
            return self.member_of(module, name) if module is not None else UNKNOWN
        if isinstance(value, Class):
            return self._class_attribute(value, _Question(name), value)
        if isinstance(value, Instance):
            return self._class_attribute(value.cls, _Question(name, of_instance=True), value)
        if isinstance(value, Super):
            cls = value.instance.cls if isinstance(value.instance, Instance) else value.instance
            return self._class_attribute(cls, _Question(name, value.after), value.instance)
        return UNKNOWN

    def _class_attribute(self, cls: Class, question: _Question, receiver: Any) -> Any:
        value, owner = self._answer(cls, question)
        self._asked.append((question, _key(value)))
        after = question.after
        if not isinstance(value, Function) or isinstance(value.node, ast.Lambda):
            return value
        kinds = {ast.unparse(d) for d in value.node.decorator_list if not isinstance(d, ast.Call)}
        if "staticmethod" in kinds or (isinstance(receiver, Class) and "classmethod" not in kinds and after is None):
            return value
        if kinds & {"property", "cached_property", "functools.cached_property"}:
            return self.run(value, (receiver,), owner=owner)
        return Bound(value, cls if "classmethod" in kinds else receiver, owner)

    def _answer(self, cls: Class, question: _Question) -> tuple[Any, Any]:
        """What a class answers to a question of a method, and the class that the answer is from."""
        known_answer = self._answers.get((id(cls), question))
        if known_answer is None:
            name = question.name
            if name == "__name__":
                known_answer = cls.name, cls
            elif name == "__class__":
                known_answer = cls, cls
            elif question.of_instance and any(
                name in self._assigned_on_self(base) for base in self.order(cls) if isinstance(base, Class)
            ):
                known_answer = UNKNOWN, None
            else:
                known_answer = self.member(cls, name, question.after) or (UNKNOWN, None)
            self._answers[id(cls), question] = known_answer
        return known_answer

    def outcome(self, function: Function, cls: Class, receiver: Instance | Class, owner: Class | None) -> Outcome:
        """Returns what comes of a method of a class; followed once for all classes that answer its questions alike.

        A method asks its class for attributes one after the other, and what it asks next depends on the answers alone:
        the answers lead through a tree to the outcome.
        """
        if function.frame.kind == "function":  # a wrapper: what it wraps is another function each time
            return self.followed(function, (receiver,), {}, owner)
        node = self._outcomes.get(id(function.node))
        while isinstance(node, _Answered):
            following = node.after.get(_key(self._answer(cls, node.question)[0]))
            if following is None:
                break
            node = following
        else:
            if node is not None:
                return node
        outside, self._asked = self._asked, []
        outcome = self.followed(function, (receiver,), {}, owner)
        self._remember(id(function.node), self._asked, outcome)
        self._asked = outside
        return outcome

    def followed(
        self, function: Function, args: tuple[Any, ...], values: dict[str, Any], owner: Class | None
    ) -> Outcome:
        """Returns what comes of a call of a function."""
        outside, self.notes = self.notes, []
        try:
            self.run(function, args, values, owner)
            return Outcome(tuple(self.notes))
        except Skipped as skipped:
            return Outcome((*self.notes, skipped.skip))
        except RecursionError:
            self.problems.append(f"{function.frame.file}, line {function.node.lineno}: too deeply nested")
            return Outcome(tuple(self.notes))
        finally:
            self.notes = outside

    def _remember(self, function: int, asked: list[tuple[_Question, Any]], outcome: Outcome) -> None:
        if not asked:
            self._outcomes[function] = outcome
            return
        node = self._outcomes.get(function)
        if not isinstance(node, _Answered):
            node = self._outcomes[function] = _Answered(asked[0][0])
        for (_, answer), (question, _) in itertools.pairwise(asked):
            following = node.after.get(answer)
            if not isinstance(following, _Answered):
                following = node.after[answer] = _Answered(question)
            node = following
        node.after[asked[-1][1]] = outcome

    def _assigned_on_self(self, cls: Class) -> set[str]:
        if id(cls) not in self._self_assigned:
            text = self.text(cls.node, cls.frame)
            self._self_assigned[id(cls)] = set(_SELF_ASSIGNED.findall(text))
        return self._self_assigned[id(cls)]

    def text(self, node: ast.AST, frame: Frame) -> str:
        """Returns the source of a function's or class's body, decorators and the line of ``def`` left out."""
        lines = self.by_file[frame.file].lines[node.lineno - 1 : node.end_lineno]  # type: ignore[attr-defined]
        return "\n".join(lines)


def _key(value: Any) -> Any:
    """What makes two answers the same: the value of a constant, the identity of anything else."""
    if isinstance(value, list | tuple):
        return (type(value), *map(_key, value))
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


_PLAIN = (str, int, float, type(None), External)


def _merge(sequences: list[list[Any]]) -> list[Any]:
    """Merges orders of classes (C3); where they contradict each other, the first one goes ahead."""
    merged: list[Any] = []
    while sequences := [sequence for sequence in sequences if sequence]:
        heads = [sequence[0] for sequence in sequences]
        head = next((h for h in heads if not any(h in sequence[1:] for sequence in sequences)), heads[0])
        merged.append(head)
        sequences = [[value for value in sequence if value is not head and value != head] for sequence in sequences]
    return merged

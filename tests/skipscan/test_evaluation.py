"""The reasoning under the scan: what is evaluated agrees with Python, and classes are searched in Python's order."""

import ast
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

from exportkit.skipscan.layout import Layout
from exportkit.skipscan.suite import Suite
from exportkit.skipscan.values import UNKNOWN, Class, Scope

CONSTANTS = st.one_of(st.integers(-5, 5), st.booleans(), st.text("ab'{}%", max_size=3), st.none()).map(repr)


def expressions(inner):
    pairs = st.tuples(inner, inner)
    operators = st.sampled_from(["+", "-", "*", "//", "%", "<", "==", "in", "is not", "and", "or"])
    return st.one_of(
        st.tuples(inner, operators, inner).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda part: f"(not {part})"),
        pairs.map(lambda parts: f"({parts[0]}, {parts[1]})"),
        pairs.map(lambda parts: f"[{parts[0]}, {parts[1]}][0]"),
        pairs.map(lambda parts: f"({parts[0]} if {parts[1]} else 'other')"),
        inner.map(lambda part: f"str({part})"),
        inner.map(lambda part: f"[x for x in ({part}, 1) if x]"),
    )


@hypothesis.given(st.recursive(CONSTANTS, expressions, max_leaves=8))
def test_an_expression_has_the_value_that_python_gives_it(text):
    tree = ast.parse(text, mode="eval").body
    value = Suite(Path(), Layout()).evaluate(tree, Scope("module", "x.py"))
    try:
        expected = eval(compile(ast.Expression(tree), "x", "eval"))
    except Exception:
        return  # what raises has no value to agree on
    hypothesis.assume("is" not in text)  # identity of equal constants is Python's to choose
    assert value is UNKNOWN or (value == expected and type(value) is type(expected))


@hypothesis.given(st.lists(st.lists(st.integers(0, 6), max_size=3, unique=True), min_size=1, max_size=7))
def test_classes_are_searched_in_the_order_of_python(bases):
    lines, made = [], {}
    for number, chosen in enumerate(bases):
        parents = [f"C{parent}" for parent in chosen if f"C{parent}" in made]
        try:
            made[f"C{number}"] = type(f"C{number}", tuple(made[parent] for parent in parents), {})
        except TypeError:  # these bases have no order
            continue
        lines.append(f"class C{number}({', '.join(parents)}): ...")
    suite, frame = Suite(Path(), Layout()), Scope("module", "x.py")
    suite.execute(ast.parse("\n".join(lines)).body, frame)
    for name, cls in made.items():
        order = [base.name for base in suite.order(frame.names[name]) if isinstance(base, Class)]
        assert order == [base.__name__ for base in cls.__mro__ if base is not object]

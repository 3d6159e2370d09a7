"""The text of errors."""

import pickle

import pytest

from exportkit import errors

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.ExportkitError)]


def test_an_error_says_what_where_expected_got_and_what_to_do():
    error = errors.PlanError("It broke.", where="x, axis 1", expected=3, got=(4, 5), hint="mend it.")
    assert str(error) == "It broke.\n  where: x, axis 1\n  expected: 3\n  got: (4, 5)\n  hint: mend it."


def test_what_is_not_known_is_not_said():
    assert str(errors.ExportError("It broke.")) == "It broke."


@pytest.mark.parametrize("cls", ALL)
def test_every_error_is_in_the_tree_at_the_top_of_the_file_and_has_one_base(cls):
    assert cls.__name__ in errors.__doc__
    assert issubclass(cls, errors.ExportkitError)


@pytest.mark.parametrize("cls", ALL)
def test_errors_survive_pickling(cls):
    error = pickle.loads(pickle.dumps(cls("It broke.", hint="mend it.")))
    assert type(error) is cls
    assert str(error) == "It broke.\n  hint: mend it."


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.NoCallsError, RuntimeError),
        (errors.UnknownMethodError, ValueError),
        (errors.UnknownInputError, ValueError),
        (errors.InvalidTypeError, TypeError),
        (errors.PlanError, RuntimeError),
        (errors.ExportError, RuntimeError),
        (errors.DestinationError, OSError),
        (errors.MissingPackageError, ImportError),
    ],
)
def test_errors_are_also_what_callers_of_the_peers_catch(cls, builtin):
    assert issubclass(cls, builtin)

"""The text of errors."""

import pickle

import pytest

from exportkit import errors

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.ExportkitError)]


def test_a_message_says_what_where_expected_got_and_hint():
    error = errors.PlanError("It broke.", where="x, axis 1", expected=3, got=(4, 5), hint="mend it.")
    assert str(error) == "It broke.\n  where: x, axis 1\n  expected: 3\n  got: (4, 5)\n  hint: mend it."


def test_unknown_parts_of_a_message_are_left_out():
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
def test_errors_are_also_the_builtin_errors_that_users_of_the_peers_catch(cls, builtin):
    assert issubclass(cls, builtin)

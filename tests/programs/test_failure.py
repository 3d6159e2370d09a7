"""When an export fails: one root cause first, in the names of the plan, and all the rest in a file."""

import linecache
import logging
import re
import threading
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit._torch_compat.graph import trace_module
from exportkit._torch_compat.tracing import watched_symbols
from exportkit.errors import ExportError, UnregisteredClassError
from exportkit.onnx_files import write
from tests.programs import failing

_PLACE = re.compile(r"(\S*failing\.py):(\d+)\n +(.+)")


def rows(*shapes):
    return [{"x": torch.randn(*shape)} for shape in shapes]


def failed(model, calls, folder):
    """Returns the error of the export."""
    observer = exportkit.InputObserver()
    with observer(model.eval(), store_n_calls=len(calls)):
        for call in calls:
            model(**call)
    with pytest.raises(ExportError) as caught:
        exportkit.export(model, observer).to_onnx(folder / "model.onnx")
    return caught.value


def golden(error):
    """The text of an error with placeholders for paths and line numbers; the numbers are right."""
    text = str(error)
    for file, number, code in _PLACE.findall(text):
        assert linecache.getline(file, int(number)).strip() == code.removesuffix(";")  # another reason follows
    text = re.sub(r"full message of torch: \S+", "full message of torch: FILE", text)
    return re.sub(r"\S*failing\.py:\d+", "failing.py:N", text)


LENGTHS = rows((2, 5, 6), (3, 7, 6))
COUNTS = [{"x": torch.randn(2, 6), "lengths": torch.tensor(counts)} for counts in ([4, 5], [4, 5, 6])]
DATA = [{"data": {"x": call["x"]}} for call in LENGTHS]

BRANCH = """\
torch.export could not trace the model: it branches on the values of a tensor.
  where: layers.1 (Positive), failing.py:N
         rows = {number: row * 2 if row.sum() > 0 else row - 1 for number, row in enumerate(x)}
  got: whether Eq(u0, 1) is not known before the model runs (data-dependent);
       the loop is unrolled: it makes a set or dict, whose length would be fixed, in failing.py:N
         rows = {number: row * 2 if row.sum() > 0 else row - 1 for number, row in enumerate(x)}
  hint: use operations on the whole tensor, or torch.scan.
        full message of torch: FILE"""

COUNT = """\
torch.export could not trace the model: it branches on the values of a tensor.
  where: the model itself (Count), failing.py:N
         return torch.stack([row * 2 if longest > 3 else row for row in x])
  got: whether u0 > 3 is not known before the model runs (data-dependent);
       u0 comes from failing.py:N
         longest = lengths.max().item();
       the loop is unrolled: Attempted to wrap unbacked SymInt, in failing.py:N
         return torch.stack([row * 2 if longest > 3 else row for row in x])
  hint: rewrite this line so that every iteration does the same to tensors of the same shapes and dtypes.
        full message of torch: FILE"""

ITEMS = """\
torch.export could not trace the model: axis 0 of lengths (lengths_axis_0) became static.
  where: the model itself (Items), failing.py:N
         return torch.stack([x[:length, :length].sum() for length in lengths.tolist()])
  expected: any size; recorded: 2, 3
  got: only 3, which is the size it was traced with;
       the loop is unrolled: several slices have lengths that depend on values, in failing.py:N
         return torch.stack([x[:length, :length].sum() for length in lengths.tolist()])
  hint: keep all rows and columns, and use a mask in place of the slices.
        full message of torch: FILE"""

FIXED = """\
torch.export could not trace the model: axis 1 of data.x (data_x_axis_1) became static.
  where: scale (Scale), failing.py:N
         return x * builtins.int(x.shape[1])
  expected: any size; recorded: 5, 7
  got: only 7, which is the size it was traced with
  hint: int() turns a size into a number: use x.shape[i] as it is.
        full message of torch: FILE"""

LOOP = """\
torch.export could not trace the model: axis 1 of x (x_axis_1) became static.
  where: the model itself (Loop), failing.py:N
         for step in range(1, x.shape[1]):
  expected: any size; recorded: 5, 7
  got: only 7, which is the size it was traced with;
       the loop is unrolled: it ends the loop early, in failing.py:N
         break
  hint: run all iterations, and keep the state once it is done: torch.where(done, state, new_state).
        full message of torch: FILE"""

FOLDED = """\
torch.export could not trace the model: axis 0 of x (batch) became static.
  where: the model itself (Folded), failing.py:N
         return (x.expand(3, -1, -1) if torch.compiler.is_exporting() else x).flatten(1)
  expected: any size; recorded: 2, 3
  got: only 3, which is the size it was traced with
  hint: write -1, or a size read from a tensor, in place of a constant.
        full message of torch: FILE"""

RAISES = """\
torch.export could not trace the model: the trace raised ValueError.
  where: the model itself (Raises), failing.py:N
         raise ValueError("not this way")
  got: ValueError: not this way
  hint: this works in eager mode; in a trace, tensors have no values and sizes are symbols: change this line.
        full message of torch: FILE"""

NUMPY = """\
torch.export could not trace the model: the trace raised RuntimeError.
  where: the model itself (Numpy), failing.py:N
         return x + torch.from_numpy(np.unwrap(x.numpy()))
  got: RuntimeError: .numpy() is not supported for tensor subclasses.
  hint: this use of NumPy cannot be traced: use torch's operations on tensors instead.
        full message of torch: FILE"""

UNTRANSLATED = """\
The program could not be translated to ONNX: there is no translation for an operator of the model.
  where: layers.1 (Bessel), failing.py:N
         return torch.special.bessel_j0(x) + 1
  got: prims.bessel_j0.default (from aten.special_bessel_j0.default)
  hint: write this line with operators that ONNX has, or observe and export the parts before and after it.
        full message of torch: FILE"""


@pytest.mark.parametrize(
    ("model", "calls", "text"),
    [
        (failing.Branch, LENGTHS, BRANCH),
        (failing.Count, COUNTS, COUNT),
        (failing.Items, COUNTS, ITEMS),
        (failing.Fixed, DATA, FIXED),
        (failing.Loop, LENGTHS, LOOP),
        (failing.Folded, rows((2, 5, 6), (3, 5, 6)), FOLDED),
        (failing.Raises, LENGTHS, RAISES),
        (failing.Numpy, LENGTHS, NUMPY),
        (failing.Untranslated, LENGTHS, UNTRANSLATED),
    ],
)
def test_the_root_cause_comes_first_in_under_fifteen_lines(model, calls, text, tmp_path):
    error = failed(model(), calls, tmp_path)
    assert golden(error) == text
    assert len(str(error).splitlines()) < 15


def test_the_first_of_two_failed_translations_is_reported(tmp_path, monkeypatch):
    failures = iter(["first", "second"])

    def translate(*_):
        raise ExportError(next(failures))

    monkeypatch.setattr(write, "translate", translate)
    error = failed(torch.nn.ReLU(), [{"input": call["x"]} for call in LENGTHS], tmp_path)
    assert str(error).startswith("first")
    assert not list(failures)


def test_all_that_torch_says_is_in_a_file_and_in_the_error(tmp_path):
    error = failed(failing.Loop(), LENGTHS, tmp_path)
    file = Path(re.search(r"full message of torch: (\S+)", str(error))[1])
    assert file.read_text() == error.details
    assert "Constraints violated (L['x'].size()[1])" in error.details
    assert "Constraints violated" in str(error.__cause__)
    file.unlink()


def test_a_folder_for_temporary_files_that_is_full_hides_nothing(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    error = failed(failing.Raises(), LENGTHS, tmp_path)
    assert "the trace raised ValueError" in str(error)
    assert "full message of torch" not in str(error)
    assert "not this way" in error.details


def test_an_axis_with_one_recorded_size_may_be_accepted_as_static(tmp_path):
    error = failed(failing.Folded(), rows((3, 5, 6)), tmp_path)
    assert 'Or accept it: export(model, observer.plan().static("batch"))' in str(error)


def test_to_look_for_the_cause_leaves_the_model_and_torchs_loggers_as_they_were(tmp_path):
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = (logger.level, list(logger.filters), list(logger.handlers))
    model = failing.Fixed().eval()
    attributes = dict(vars(model))
    failed(model, DATA, tmp_path)
    assert (logger.level, list(logger.filters), list(logger.handlers)) == before
    assert vars(model) == attributes


def test_the_line_is_found_where_logging_is_disabled(tmp_path):
    logging.disable(logging.WARNING)
    try:
        assert golden(failed(failing.Loop(), LENGTHS, tmp_path)) == LOOP
        assert logging.root.manager.disable == logging.WARNING
    finally:
        logging.disable(logging.NOTSET)


def test_messages_of_other_threads_are_not_taken():
    taken, logger = [], logging.getLogger("torch.fx.experimental.symbolic_shapes")
    with watched_symbols(lambda message, arguments: taken.append((message, arguments))):
        thread = threading.Thread(target=logger.info, args=("create_symbol %s", "s1"))
        thread.start()
        thread.join()
        logger.info("create_symbol %s", "s2")
    logger.info("create_symbol %s", "s3")
    assert taken == [("create_symbol %s", ("s2",))]


def test_a_success_is_not_traced_twice(monkeypatch):
    count = []
    real = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: count.append(1) or real(*args, **kwargs))
    model, observer = torch.nn.Linear(6, 2), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(3, 6))
    exportkit.export(model, observer)
    assert len(count) == 1


def test_an_output_that_nothing_describes_is_an_error():
    model, observer = failing.Boxed(), exportkit.InputObserver()
    with observer(model):
        for call in LENGTHS:
            model(**call)
    with pytest.raises(UnregisteredClassError) as caught:
        exportkit.export(model, observer)
    assert "where: output" in str(caught.value)
    assert "failing.Box with tensors in tensor" in str(caught.value)


def test_torch_prints_no_graph_of_its_own(capfd, tmp_path):
    class Decides(torch.nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x - 1

    model, observer = Decides(), exportkit.InputObserver()
    with observer(model):
        for batch in (2, 3):
            model(torch.rand(batch, 8))
    assert str(exportkit.export(model, observer).attempts[0]).startswith("plain trace: failed, GuardOnDataDependent")
    assert "def forward" not in "".join(capfd.readouterr())
    assert "print" not in vars(trace_module())

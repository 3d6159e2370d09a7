"""What a model refuses on the CPU is an exception on a GPU, too; here the checks are made for tensors on the CPU."""

import pytest
import torch

from exportkit._torch_compat.cuda import indices_checked

TABLE, THREE = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 2, 3])


def calls(index):
    """What looks something up, by name, with an index of a table of four rows."""
    square = index.expand(3, 3).T.contiguous()
    return {
        "embedding": lambda: torch.nn.functional.embedding(index, TABLE),
        "embedding_bag": lambda: torch.nn.functional.embedding_bag(index[None], TABLE),
        "index": lambda: TABLE[index],
        "index after a slice": lambda: TABLE.T[:, index],
        "index with a mask": lambda: TABLE[None][torch.ones(1, dtype=torch.bool), index[:1]],
        "index_put": lambda: TABLE.clone().index_put_((index,), torch.zeros(())),
        "index_select": lambda: TABLE.index_select(0, index),
        "index_add": lambda: TABLE.index_add(0, index, TABLE[:3]),
        "index_copy": lambda: TABLE.index_copy(0, index, TABLE[:3]),
        "index_fill": lambda: TABLE.index_fill(0, index, 1.0),
        "gather": lambda: TABLE.gather(0, square),
        "scatter": lambda: TABLE.scatter(0, square, TABLE[:3]),
        "scatter_add": lambda: TABLE.scatter_add(0, square, TABLE[:3]),
        "scatter_reduce": lambda: TABLE.scatter_reduce(0, square, TABLE[:3], "amax"),
        "take": lambda: TABLE[:, 0].contiguous().take(index),
        "cross_entropy": lambda: torch.nn.functional.cross_entropy(TABLE.T.contiguous(), index),
    }


@pytest.mark.parametrize("name", calls(THREE))
def test_an_index_that_is_out_of_bounds_raises(name):
    with indices_checked(("cpu",)):
        inside = calls(THREE)[name]()
        with pytest.raises(IndexError, match=r"index 4 is out of bounds for dimension \d with size 4"):
            calls(torch.tensor([4, 0, 1]))[name]()

    assert torch.equal(inside, calls(THREE)[name]())


def test_negative_indices_count_from_the_end_where_torch_allows_them():
    with indices_checked(("cpu",)):
        assert torch.equal(TABLE[torch.tensor([-4])], TABLE[:1])
        with pytest.raises(IndexError, match="index -5"):
            TABLE[torch.tensor([-5])]
        with pytest.raises(IndexError, match="index -1"):
            TABLE.gather(0, torch.tensor([[-1]]))
        assert TABLE[torch.empty(0, dtype=torch.int64)].shape == (0, 3)


def test_other_values_that_are_refused_raise():
    loss = torch.nn.functional
    with indices_checked(("cpu",)):
        torch._assert_async(torch.tensor(True))
        with pytest.raises(RuntimeError, match="no more"):
            torch._assert_async(torch.tensor(False), "no more")
        with pytest.raises(RuntimeError, match="nan"):
            torch.multinomial(torch.tensor([0.5, float("nan")]), 1)
        with pytest.raises(RuntimeError, match="between 0 and 1"):
            loss.binary_cross_entropy(torch.tensor([2.0]), torch.tensor([1.0]))
        ignored = loss.cross_entropy(TABLE, torch.tensor([0, 1, 2, -100]))
    assert torch.equal(ignored, loss.cross_entropy(TABLE, torch.tensor([0, 1, 2, -100])))


def test_tensors_elsewhere_are_left_alone():
    with indices_checked(("cuda",)), pytest.raises(IndexError, match="index out of range in self"):
        torch.nn.functional.embedding(torch.tensor([4]), TABLE)


class Branching(torch.nn.Module):
    """Looks something up in a branch of a graph."""

    def forward(self, x, index):
        return torch.cond(x.sum() > 0, lambda x, i: x[i], lambda x, i: -x[i], (x, index))


def test_branches_of_a_program_run():
    program = torch.export.export(Branching(), (TABLE, THREE))
    with indices_checked(("cpu",)):
        assert torch.equal(program.module()(TABLE, THREE), TABLE[THREE])

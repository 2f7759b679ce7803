"""Loaders of one's own as the data of a run."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import hiap
from hiap.training.config import Config
from hiap.training.setup import as_data, steps_per_epoch

CPU = torch.device("cpu")


class Noisy(Dataset[Any]):
    """Pictures with noise of all three kinds of random numbers, each labelled by its number."""

    classes = [f"class {i}" for i in range(40)]  # noqa: RUF012

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(3, 4, 4) + random.random() + float(np.random.rand()), index


def bound(train: Any, val: Any = None, batch: int = 8, seed: int = 0, **options: Any) -> Any:
    config = Config(target="50%", batch_size=batch, seed=seed)
    loaders = (train, val or DataLoader(Noisy(), batch_size=16))
    return as_data(hiap.LoaderData(*loaders, **options) if options else loaders, config, CPU)


def plain(count: int = 20) -> TensorDataset:
    return TensorDataset(torch.zeros(count, 3, 4, 4), torch.arange(count) % 5)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_a_shuffled_loader_is_the_same_whenever_the_epoch_is(workers: int, generator: torch.Generator | None) -> None:
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=workers, generator=generator)
    whole = list(bound(loader).train(3, 0, 8, 0, 1))
    assert len(whole) == 5 and sorted(torch.cat([y for _, y in whole]).tolist()) == list(range(40))
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    batches = bound(loader).train(3, 2, 8, 0, 1)
    again = [next(batches)]
    torch.rand(7)  # what the run draws between batches does not matter
    again += list(batches)
    for one, two in zip(whole[2:], again, strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    torch.set_rng_state(before[2])
    list(bound(loader).train(4, 0, 8, 0, 1)), list(bound(loader).val(8))
    assert before[:2] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(before[2], torch.get_rng_state())
    for other in (bound(loader).train(4, 0, 8, 0, 1), bound(loader, seed=1).train(3, 0, 8, 0, 1)):
        assert not torch.equal(next(other)[1], whole[0][1])


@pytest.mark.parametrize("drop", [False, True])
def test_an_epoch_has_the_whole_batches_of_the_loader(drop: bool) -> None:
    data = bound(DataLoader(plain(20), batch_size=8, drop_last=drop), DataLoader(plain(11), batch_size=4))
    assert steps_per_epoch(Config(batch_size=8), data) == 2 == len(list(data.train(0, 0, 8, 0, 1)))
    assert [len(y) for _, y in data.train(0, 1, 8, 0, 1)] == [8]
    assert [len(y) for _, y in data.val(100)] == [4, 4, 3] and data.val_size == 11
    sampler = WeightedRandomSampler([1.0] * 20, 50)
    assert steps_per_epoch(Config(batch_size=8), bound(DataLoader(plain(20), batch_size=8, sampler=sampler))) == 6


def test_other_batches_than_those_of_the_configuration_are_refused() -> None:
    with pytest.raises(ValueError) as caught:
        bound(DataLoader(plain(), batch_size=4))
    assert str(caught.value) == "the training loader has batches of 4, the configuration 8: make them equal"
    batches = [(torch.zeros(8, 3, 4, 4), torch.zeros(8, dtype=torch.long))] * 2
    short = (torch.zeros(3, 3, 4, 4), torch.zeros(3, dtype=torch.long))
    data = bound([*batches, short], classes=5)
    with pytest.raises(ValueError, match=r"batch 2 of the training loader has 3 images, not 8: .*drop_last=True"):
        list(data.train(0, 0, 8, 0, 1))
    assert len(list(bound(batches, classes=5).train(0, 1, 8, 0, 1))) == 1


def test_classes_are_those_of_the_data_set_or_given() -> None:
    named = bound(DataLoader(Subset(Noisy(), range(16)), batch_size=8))
    assert (named.classes, named.class_names) == (40, Noisy.classes)
    counted = bound(DataLoader(plain(), batch_size=8))
    assert (counted.classes, counted.class_names) == (5, None)
    assert bound(DataLoader(plain(), batch_size=8), class_names=list("abcdef")).classes == 6
    assert bound(DataLoader(plain(), batch_size=8), classes=9).classes == 9
    with pytest.raises(
        ValueError, match=r"not known \(the data set does not say it\): pass LoaderData\(train, val, cl"
    ):
        bound([1])
    with pytest.raises(ValueError, match=r"not known \(found 2 names for 3\)"):
        bound([1], classes=3, class_names=["a", "b"])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, r"data must be a pair of loaders \(train, val\), or an object like hiap\.Data; found int"),
        ("photos/", "data must be a pair of loaders .*; found str"),
        ((7, []), r"the training loader must yield \(images, labels\), as a DataLoader does; found int"),
        (([], torch.zeros(3)), "the validation loader must yield .*; found Tensor"),
        ((DataLoader(Endless()), []), "the training loader must have a length"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        as_data(data, Config(), CPU)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"image": 1}, r"a loader must yield \(images, labels\); found dict"),
        (
            (torch.zeros(8, 3, 4, 4, dtype=torch.uint8), torch.zeros(8)),
            r"normalised float tensors .*; found torch\.uint8",
        ),
        (
            (torch.zeros(8, 3, 4, 4), torch.zeros(8)),
            r"labels must be whole numbers, one per image; found torch\.float32",
        ),
        (
            (torch.zeros(8, 3, 4, 4), torch.full((8,), 5)),
            "a label must be from 0 to 4, by the number of classes; found 5",
        ),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(bound([batch], classes=5).train(0, 0, 8, 0, 1))


def test_an_empty_validation_loader_is_refused() -> None:
    with pytest.raises(ValueError, match="the validation loader is empty: give it images"):
        list(as_data((DataLoader(plain(), batch_size=8), []), Config(batch_size=8), CPU).val(8))


def test_several_processes_need_data_that_knows_of_them() -> None:
    pair = (DataLoader(plain(), batch_size=8),) * 2
    with pytest.raises(ValueError, match="a pair of loaders is for one process, found 2: pass an object like hiap"):
        as_data(pair, Config(batch_size=8), CPU, world=2)
    with pytest.raises(ValueError, match="for one process, found 4"):
        next(as_data(pair, Config(batch_size=8), CPU).train(0, 0, 8, 1, 4))


def test_an_object_like_data_is_taken_as_it_is() -> None:
    class Own:
        classes, class_names, train_size, val_size = 2, None, 8, 8

        def train(self, epoch: int, start: int, batch: int, rank: int, world: int) -> Any: ...

        def val(self, batch: int) -> Any: ...

    own = Own()
    assert as_data(own, Config(), CPU) is own


def test_what_a_loader_says_of_itself() -> None:
    data = TensorDataset(torch.zeros(40, 3, 4, 4), torch.arange(40) % 20)
    some = DataLoader(data, 4, sampler=SubsetRandomSampler(range(8)))
    assert hiap.LoaderData(some, some).val_size == 8

    class Parity(Dataset[Any]):
        dataset, classes = data, ["even", "odd"]

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return self.dataset[index][0], index % 2

    loader = DataLoader(Parity(), 4)
    own = hiap.LoaderData(loader, loader)
    assert (own.classes, own.class_names) == (2, ["even", "odd"])

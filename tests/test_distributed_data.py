"""How ranks share the data, without starting any."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.utils.data import DistributedSampler

from lightning_sonar.data import DataError
from lightning_sonar.data.loader import ResumableLoader, Share, ShuffledBatches, even_batches
from lightning_sonar.data.module import InstructionData

SIZES = [1, 2, 3, 7, 16, 33]
RANKS = [1, 2, 3, 8]


def shares(count):
    return [Share(rank, count) for rank in range(count)]


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_take_turns_at_the_batches_of_one_process(ranks):
    alone = list(ShuffledBatches(50, 2, seed=3))
    turns = [list(ShuffledBatches(50, 2, 3, share)) for share in shares(ranks)]
    assert {len(turn) for turn in turns} == {25 // ranks}
    together = [batch for turn in zip(*turns, strict=True) for batch in turn]
    assert together == alone[: len(together)]


@pytest.mark.parametrize("before", RANKS)
@pytest.mark.parametrize("after", RANKS)
def test_another_number_of_ranks_goes_on_with_the_next_batch(before, after):
    def loaders(count):
        data = list(range(240))
        return [ResumableLoader(data, ShuffledBatches(240, 1, 5, share), collate_fn=list) for share in shares(count)]

    first, second = loaders(before), loaders(after)
    seen: list[int] = []
    iterators = [iter(loader) for loader in first]
    for _ in range(24 // before):
        seen += [next(iterator)[0] for iterator in iterators]
    for loader in second:
        loader.load_state_dict(first[0].state_dict())
    rest = [batch[0] for turn in zip(*second, strict=True) for batch in turn]
    assert sorted(seen + rest) == list(range(240))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_every_rank_has_equally_many_held_out_batches_and_every_example_is_on_one(size, ranks, batch_size):
    made = [even_batches(size, batch_size, share) for share in shares(ranks)]
    assert len({len(batches) for batches in made}) == 1
    assert all(batch for batches in made for batch in batches)
    for batches in made:
        examples = [index for batch in batches for index in batch]
        assert len(set(examples)) == len(examples)
        assert max(len(batch) for batch in batches) <= max(batch_size, 2)
    everywhere = sorted(index for batches in made for batch in batches for index in batch)
    assert everywhere == (list(range(size)) if size >= ranks else sorted(list(range(size)) * ranks))


@pytest.fixture
def on_two_ranks(tmp_path):
    """Data of a Trainer that trains on two ranks, of which this is the second."""
    data = InstructionData(seq_len=64, max_records=100, cache_dir=str(tmp_path), batch_size=2)
    data.setup()
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 1})
    return data


def test_loaders_are_shared_out_so_that_lightning_leaves_them_alone(on_two_ranks):
    training, heldout = on_two_ranks.train_dataloader(), on_two_ranks.val_dataloader()
    # What Lightning asks before it would put a sampler of its own into a loader.
    assert isinstance(training.sampler, DistributedSampler)
    assert isinstance(heldout.sampler, DistributedSampler)
    assert len(training) == len(on_two_ranks.train_set) // 4
    assert sum(len(batch["input_ids"]) for batch in heldout) == len(on_two_ranks.heldout_set) // 2


def test_too_few_examples_for_all_ranks_are_an_error_that_says_so(on_two_ranks):
    on_two_ranks.trainer.distributed_sampler_kwargs["num_replicas"] = 1000
    with pytest.raises(DataError, match="on 1000 ranks"):
        on_two_ranks.train_dataloader()

import pytest
import torch
from torch import Tensor

from hf_sphere.data import Masking, TextBatches, Vocabulary

# Tokens 0 to 4 are special: 2 precedes a text, 3 follows it, 4 is the mask token.
VOCABULARY = Vocabulary(prefix=(2,), suffix=(3,), mask=4, special=torch.arange(5), ordinary=torch.arange(5, 50))


def blocks(count: int = 40, length: int = 10) -> Tensor:
    """Random tokens, int32 like loaded ones."""
    return torch.randint(5, 50, (count, length), dtype=torch.int32, generator=torch.Generator().manual_seed(0))


def make_batches(count: int = 40, **options) -> TextBatches:
    return TextBatches(blocks(count), VOCABULARY, **{"batch_size": 8, "masking": Masking(), **options})


def mask(probability: float, tokens: Tensor) -> tuple[Tensor, Tensor]:
    keys = torch.randint(2**62, (len(tokens),), generator=torch.Generator().manual_seed(0))
    return Masking(probability)(tokens.long(), VOCABULARY, keys)


def same(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a[key], b[key]) for a, b in zip(first, second, strict=True) for key in ("input_ids", "labels")
    )


# Which tokens are targets


@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_the_requested_fraction_is_80_percent_masked_10_percent_replaced_and_10_percent_unchanged(probability):
    tokens = blocks(2000, 100).long()
    seen, labels = mask(probability, tokens)
    target = labels != -100
    assert target.double().mean().item() == pytest.approx(probability, abs=0.005)
    assert torch.equal(labels[target], tokens[target])
    assert torch.equal(seen[~target], tokens[~target])
    assert set(seen[seen < 5].tolist()) == {4}
    hidden, kept = (seen[target] == 4).double().mean(), (seen[target] == tokens[target]).double().mean()
    by_chance = 0.1 / 45  # a random token is sometimes the original one
    assert [hidden.item(), kept.item()] == pytest.approx([0.8, 0.1 + by_chance], abs=0.006)


@pytest.mark.parametrize("probability", [1e-6, 0.3, 1.0])
def test_special_tokens_inside_a_text_are_neither_masked_nor_predicted(probability):
    tokens = blocks(200, 12).masked_fill(torch.rand(200, 12) < 0.5, 1)
    tokens[:, 0] = 7  # so that each block has a target
    seen, labels = mask(probability, tokens)
    assert not (labels == 1).any()
    assert (seen[tokens == 1] == 1).all()
    assert (labels != -100).any(1).all()


def test_the_targets_among_ordinary_tokens_do_not_depend_on_the_special_ones():
    tokens = blocks(50, 20)
    some = torch.rand(50, 20) < 0.2
    labels = [mask(0.5, each)[1] for each in (tokens, tokens.masked_fill(some, 1))]
    assert torch.equal(labels[0][~some], labels[1][~some])


# Batches


def test_blocks_of_special_tokens_alone_are_left_out():
    tokens = blocks(5)
    tokens[[1, 3]] = 1
    left = TextBatches(tokens, VOCABULARY, batch_size=2, masking=Masking())
    assert torch.equal(left.tokens, tokens[[0, 2, 4]])
    assert all((batch["labels"] != -100).any(1).all() for batch in left.epoch())
    assert TextBatches(tokens, VOCABULARY, batch_size=2).num_examples == 5


def test_special_tokens_surround_a_block_and_the_targets_are_counted():
    for batch in make_batches().epoch():
        assert (batch["input_ids"][:, 0] == 2).all()
        assert (batch["input_ids"][:, -1] == 3).all()
        assert (batch["labels"][:, [0, -1]] == -100).all()
        assert TextBatches.num_targets(batch) == sum(label != -100 for label in batch["labels"].flatten().tolist())
    for batch in make_batches(masking=None).epoch():  # without it every token is a target
        assert torch.equal(batch["input_ids"], batch["labels"])
        assert TextBatches.num_targets(batch) == batch["labels"].numel()


def test_a_training_epoch_is_reproducible_from_any_batch_and_keeps_the_global_random_state():
    before = torch.get_rng_state()
    batches, whole = make_batches(shuffle=True), list(make_batches(shuffle=True).epoch(2))
    for start in (0, 1, 4, 5):
        assert same(whole[start:], list(batches.epoch(2, start=start)))
    assert torch.equal(torch.get_rng_state(), before)


def test_order_and_masking_differ_between_epochs_blocks_and_seeds():
    tokens = [torch.cat([b["labels"] for b in make_batches(shuffle=True, masking=None).epoch(e)]) for e in (0, 1)]
    assert not torch.equal(*tokens)
    assert torch.equal(*(part.unique(dim=0) for part in tokens))
    # The order of a single block cannot vary.
    first, second = (next(make_batches(1, shuffle=True).epoch(epoch))["labels"] for epoch in (0, 1))
    assert not torch.equal(first, second)
    assert not same(list(make_batches().epoch()), list(make_batches(seed=1).epoch()))
    (batch,) = TextBatches(blocks(1).repeat(2, 1), VOCABULARY, batch_size=2, masking=Masking()).epoch()
    assert not torch.equal(*batch["labels"])


@pytest.mark.parametrize("count", [5, 16, 41])
def test_processes_train_on_equally_many_blocks_and_cover_all(count):
    shares = [make_batches(count, masking=None, shuffle=True, process_index=i, num_processes=3) for i in range(3)]
    tokens = [torch.cat([batch["labels"] for batch in share.epoch()]) for share in shares]
    assert len({len(part) for part in tokens}) == 1
    assert sum(map(len, tokens)) == shares[0].examples_per_epoch
    assert len(torch.cat(tokens).unique(dim=0)) == count


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("batch_size", "num_processes"), [(1, 1), (7, 1), (3, 2), (5, 4)])
def test_masking_is_independent_of_batch_size_and_processes_and_in_evaluation_of_the_epoch(
    batch_size, num_processes, shuffle
):
    (expected,) = make_batches(batch_size=40, shuffle=shuffle).epoch(2)
    options = {"batch_size": batch_size, "num_processes": num_processes, "shuffle": shuffle}
    for index in range(num_processes):
        share = [b["input_ids"] for b in make_batches(process_index=index, **options).epoch(2 if shuffle else 5)]
        assert torch.equal(torch.cat(share), expected["input_ids"][index::num_processes])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("count", "batch_size"), [(1, 4), (8, 4), (9, 4), (40, 64)])
def test_an_epoch_has_len_batches(count, batch_size, shuffle):
    batches = make_batches(count, batch_size=batch_size, shuffle=shuffle)
    assert len(list(batches.epoch())) == len(batches)


def test_bad_input_is_refused():
    for probability in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"mask_probability must be a number in \(0, 1\]"):
            Masking(probability)
    with pytest.raises(ValueError, match="all tokens are special, so nothing can be predicted; use a tokenizer"):
        TextBatches(blocks(5).fill_(1), VOCABULARY, batch_size=2, masking=Masking())

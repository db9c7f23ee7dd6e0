import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from hf_sphere.data import Masking, TextBatches, Vocabulary

# Tokens 0 to 4 are special: 2 stands before a text, 3 after it, 4 hides a token.
VOCABULARY = Vocabulary(prefix=(2,), suffix=(3,), mask=4, ordinary=torch.arange(5, 50))


def blocks(count: int = 40, length: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens, int32 as they are loaded, and word starts."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 50, (count, length), dtype=torch.int32, generator=generator)
    return tokens, torch.rand(count, length, generator=generator) < 0.6


def make_batches(count: int = 40, **options) -> TextBatches:
    return TextBatches(*blocks(count), VOCABULARY, **{"batch_size": 8, "masking": Masking(), **options})


def mask(masking: Masking, count: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and word starts, and what the masking makes of them: what is seen, and labels."""
    tokens, starts = blocks(count, length)
    tokens = tokens.long()
    return tokens, starts, *masking(tokens, starts, VOCABULARY, torch.Generator().manual_seed(seed))


def same(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a[key], b[key]) for a, b in zip(first, second, strict=True) for key in ("input_ids", "labels")
    )


# Which tokens are targets


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("probability", [0.15, 0.4])
def test_so_many_tokens_are_targets_as_were_asked_for(probability, whole_words):
    *_, labels = mask(Masking(probability, whole_words), 2000, 100)
    assert (labels != -100).double().mean().item() == pytest.approx(probability, abs=0.005)


def test_of_the_targets_80_percent_are_hidden_10_are_replaced_and_10_stay():
    tokens, _, seen, labels = mask(Masking(), 2000, 100)
    target = labels != -100
    hidden, kept = (seen[target] == 4).double().mean(), (seen[target] == tokens[target]).double().mean()
    by_chance = 0.1 / 45  # a random token is now and then the same
    assert [hidden.item(), kept.item()] == pytest.approx([0.8, 0.1 + by_chance], abs=0.006)


def test_a_label_is_the_token_that_was_there():
    tokens, _, _, labels = mask(Masking(), 50, 20)
    target = labels != -100
    assert torch.equal(labels[target], tokens[target])


def test_what_is_no_target_is_seen_as_it_is():
    tokens, _, seen, labels = mask(Masking(), 50, 20)
    assert torch.equal(seen[labels == -100], tokens[labels == -100])


def test_no_special_token_but_the_mask_comes_into_a_text():
    *_, seen, _ = mask(Masking(0.9), 500, 50)
    assert set(seen[seen < 5].tolist()) == {4}


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 2**32), st.booleans())
def test_every_block_has_a_target(length, count, seed, whole_words):
    *_, labels = mask(Masking(1e-6, whole_words), count, length, seed)
    assert (labels != -100).any(1).all()


@given(st.integers(2, 30), st.integers(0, 2**32))
def test_a_word_is_a_target_with_all_of_its_tokens_or_with_none(length, seed):
    _, starts, _, labels = mask(Masking(0.3, whole_words=True), 4, length, seed)
    for row, target in zip(starts.tolist(), (labels != -100).tolist(), strict=True):
        for position in range(1, length):
            assert row[position] or target[position] == target[position - 1]


def test_tokens_of_a_word_are_hidden_and_replaced_by_themselves():
    """As BERT's own program does; else a random word would be one token repeated."""
    tokens = torch.full((1, 4000), 7)
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    seen, _ = Masking(1.0, whole_words=True)(tokens, starts, VOCABULARY, torch.Generator().manual_seed(0))
    assert (seen == 4).double().mean().item() == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.5, float("nan")])
def test_an_impossible_share_is_refused(probability):
    with pytest.raises(ValueError, match="mask_probability must be above 0"):
        Masking(probability)


# Batches


def test_special_tokens_stand_round_a_block_and_are_no_targets():
    for batch in make_batches().epoch():
        assert (batch["input_ids"][:, 0] == 2).all()
        assert (batch["input_ids"][:, -1] == 3).all()
        assert (batch["labels"][:, [0, -1]] == -100).all()


def test_where_nothing_is_hidden_every_token_is_a_target():
    for batch in make_batches(masking=None).epoch():
        assert torch.equal(batch["input_ids"], batch["labels"])
        assert TextBatches.num_targets(batch) == batch["labels"].numel()


def test_batches_tell_the_number_of_their_targets():
    for batch in make_batches().epoch():
        assert TextBatches.num_targets(batch) == sum(label != -100 for label in batch["labels"].flatten().tolist())


def test_an_epoch_of_training_is_the_same_when_made_again():
    assert same(*(list(make_batches(shuffle=True).epoch(3)) for _ in range(2)))


@pytest.mark.parametrize("start", [1, 4, 5])
def test_an_epoch_can_begin_in_its_middle(start):
    batches = make_batches(shuffle=True)
    assert same(list(batches.epoch(2))[start:], list(batches.epoch(2, start=start)))


def test_another_epoch_has_another_order():
    tokens = [torch.cat([b["labels"] for b in make_batches(shuffle=True, masking=None).epoch(e)]) for e in (0, 1)]
    assert not torch.equal(*tokens)
    assert torch.equal(*(part.unique(dim=0) for part in tokens))


def test_another_epoch_hides_other_tokens():
    """Shown with a single block, which has no order."""
    first, second = (next(make_batches(1, shuffle=True).epoch(epoch))["labels"] for epoch in (0, 1))
    assert not torch.equal(first, second)


def test_another_seed_hides_other_tokens():
    assert not same(list(make_batches().epoch()), list(make_batches(seed=1).epoch()))


@pytest.mark.parametrize("count", [5, 16, 41])
def test_processes_train_on_equally_many_blocks_and_leave_none_out(count):
    shares = [make_batches(count, masking=None, shuffle=True, process_index=i, num_processes=3) for i in range(3)]
    tokens = [torch.cat([batch["labels"] for batch in share.epoch()]) for share in shares]
    assert len({len(part) for part in tokens}) == 1
    assert sum(map(len, tokens)) == shares[0].examples_per_epoch
    assert len(torch.cat(tokens).unique(dim=0)) == count


def test_processes_hide_other_tokens_of_the_same_block():
    first, second = (
        next(make_batches(1, shuffle=True, process_index=index, num_processes=2).epoch())["labels"] for index in (0, 1)
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("batch_size", "num_processes"), [(1, 1), (7, 1), (40, 1), (3, 2), (8, 4)])
def test_evaluation_hides_the_same_tokens_however_it_is_shared(batch_size, num_processes):
    (expected,) = make_batches(batch_size=40).epoch()
    options = {"batch_size": batch_size, "num_processes": num_processes}
    for index in range(num_processes):
        share = [b["input_ids"] for b in make_batches(process_index=index, **options).epoch(epoch=5)]
        assert torch.equal(torch.cat(share), expected["input_ids"][index::num_processes])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("count", "batch_size"), [(1, 4), (8, 4), (9, 4), (40, 64)])
def test_an_epoch_has_as_many_batches_as_its_length_says(count, batch_size, shuffle):
    batches = make_batches(count, batch_size=batch_size, shuffle=shuffle)
    assert len(list(batches.epoch())) == len(batches)


def test_making_batches_draws_no_random_numbers():
    before = torch.get_rng_state()
    list(make_batches(shuffle=True).epoch())
    assert torch.equal(torch.get_rng_state(), before)


def test_impossible_sizes_are_refused():
    tokens, starts = blocks()
    with pytest.raises(ValueError, match=r"must both be \(N, L\); got \(40, 10\) and \(40, 9\)"):
        TextBatches(tokens, starts[:, 1:], VOCABULARY, batch_size=8)
    with pytest.raises(ValueError, match="the batch size must be at least 1; got 0"):
        TextBatches(tokens, starts, VOCABULARY, batch_size=0)

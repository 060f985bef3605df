"""Sequences that share prefixes in one row, against the same sequences one by one."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from tiny import ARCHS, STYLE_OF, plain_logps, tiny_model, tiny_tokenizer

from optima_lite.training import attention
from optima_lite.training.losses import completion_logps, dpo_loss
from optima_lite.training.pack import Completion, Trie, collate


def family(rng: random.Random, vocabulary: int) -> list[Completion]:
    """Completions after prompts that begin alike, of very different lengths."""

    def words(low: int, high: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(low, high))]

    prompt = words(20, 40)
    longer = prompt + words(1, 30)
    made = [Completion(p + words(1, 25), len(p)) for p in (prompt, prompt, longer, longer)]
    twin = [*made[0].ids[:-1], rng.randrange(vocabulary)]  # differs in its last token at most
    return [*made, Completion(twin, len(prompt))]


def row_of(completions: list[Completion]) -> Trie:
    row = Trie()
    for completion in completions:
        assert row.new_tokens(completion) <= len(completion.ids)
        before = len(row.ids)
        expected = row.new_tokens(completion)
        row.add(completion)
        assert len(row.ids) - before == expected
    return row


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_a_trie_on_paper() -> None:
    """1 2 | 3 4 and 1 2 | 3 5 and 1 2 6 | 7: tokens 1 2 3 4 5 6 7, each once.

    Parents: 1 none, 2 after 1, 3 after 2, 4 after 3, 5 after 3, 6 after 2, 7 after 6. Predicted: 3
    from 2 and 4 from 3; 3 from 2 and 5 from 3; 7 from 6.
    """
    row = row_of(
        [Completion([1, 2, 3, 4], 2), Completion([1, 2, 3, 5], 2), Completion([1, 2, 6, 7], 3)]
    )
    assert row.ids == [1, 2, 3, 4, 5, 6, 7]
    assert row.positions == [0, 1, 2, 3, 3, 2, 3]
    assert row.parents == [-1, 0, 1, 2, 2, 1, 5]
    assert row.sources == [[1, 2], [1, 2], [5]]
    assert row.targets == [[3, 4], [3, 5], [7]]
    sees = [[j for j in range(7) if row.seen()[i, j]] for i in range(7)]
    assert sees == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5], [0, 1, 5, 6]]


@pytest.fixture(params=[False, True], ids=["fused", "blocks"])
def in_some_blocks(request, monkeypatch):
    """A context for a model: as it is, or attending in blocks of 16 queries."""
    monkeypatch.setattr(attention, "BLOCK", 16)
    return attention.in_blocks if request.param else lambda model: nullcontext()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", [0, 1])
def test_logps_and_gradients_equal_a_loop(arch: str, seed: int, in_some_blocks) -> None:
    """Two rows, one of them padded; qwen2, gemma2 and mistral have biases, caps and windows."""
    rng = random.Random(seed)
    tokenizer = tiny_tokenizer(STYLE_OF[arch])
    model = tiny_model(arch, tokenizer).train()
    families = [family(rng, len(tokenizer)) for _ in range(2)]
    every = [c for one in families for c in one]
    exact = plain_logps(model, every)
    weights = torch.tensor([rng.uniform(-1, 1) for _ in every])
    expected = gradients(model, (exact * weights).sum())
    batch = collate([row_of(one) for one in families], pad=3)
    with in_some_blocks(model):
        sums, tokens = completion_logps(model, batch, len(every))
    assert tokens.tolist() == [len(c.ids) - c.start for c in every]
    torch.testing.assert_close(sums, exact, rtol=1e-5, atol=1e-4)
    found = gradients(model, (sums * weights).sum())
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4, msg=name)


def test_blocks_are_used_where_the_fused_kernel_would_be(monkeypatch) -> None:
    """And by nobody else: gemma2 caps its scores, which the fused kernel cannot."""
    calls = []
    real = attention.AttentionInterface().get_interface(attention.NAME, None)

    def counting(*args, **kwargs):
        calls.append(args[1].shape)
        return real(*args, **kwargs)

    monkeypatch.setitem(attention.AttentionInterface()._global_mapping, attention.NAME, counting)
    for arch in ARCHS:
        calls.clear()
        tokenizer = tiny_tokenizer(STYLE_OF[arch])
        model = tiny_model(arch, tokenizer)
        row = row_of(family(random.Random(0), len(tokenizer)))
        used = model.config._attn_implementation
        with attention.in_blocks(model):
            completion_logps(model, collate([row], 0), 5)
        assert len(calls) == (0 if arch == "gemma2" else len(model.model.layers))
        assert model.config._attn_implementation == used
        assert attention.NAME not in model.config.to_json_string()


def test_masks_that_cannot_be_added_are_left_to_the_fused_kernel() -> None:
    """As transformers makes them of padding: true where a token may look."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 9, 8, generator=generator) for _ in range(3))
    seen = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
    module = torch.nn.Module()
    said, _ = attention.block_attention(module, query, key, value, seen)
    additive = torch.zeros(2, 1, 9, 9).masked_fill(~seen, torch.finfo(torch.float32).min)
    same, _ = attention.block_attention(module, query, key, value, additive)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    torch.testing.assert_close(said, expected.transpose(1, 2))
    torch.testing.assert_close(same, expected.transpose(1, 2))


def test_each_predicting_state_is_projected_once() -> None:
    tokenizer = tiny_tokenizer("llama3")
    model = tiny_model("llama", tokenizer)
    made = family(random.Random(0), len(tokenizer))
    row = row_of(made)
    shapes = []
    handle = model.get_output_embeddings().register_forward_hook(
        lambda module, args, out: shapes.append(out.shape[:-1])
    )
    completion_logps(model, collate([row], 0), len(made))
    handle.remove()
    distinct = {source for where in row.sources for source in where}
    assert shapes == [(1, len(distinct))]


def test_dpo_of_equal_policies_is_ln_2() -> None:
    loss = dpo_loss(torch.zeros(3), torch.zeros(3), 0.1)
    assert loss.tolist() == pytest.approx([0.6931472] * 3)
    loss = dpo_loss(torch.tensor([2.0]), torch.tensor([-1.0]), 0.5)
    assert loss.item() == pytest.approx(0.2014133)  # -log(1 / (1 + e^-1.5))

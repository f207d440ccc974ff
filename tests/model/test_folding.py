"""Folding: which rows feed which columns, and what is divided multiplies out."""

import torch

from quantkit.model.folding import FOLDS, Factors, fold_into, shared_rows


def test_query_heads_of_a_group_share_the_rows_of_their_key_value_head() -> None:
    config = {"hidden_size": 12, "num_attention_heads": 6, "head_dim": 2}
    value, up = FOLDS[1], FOLDS[3]
    assert shared_rows(value, 4, 12, config).tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert shared_rows(value, 4, 12, {**config, "head_dim": None}).tolist() == [
        0,
        1,
        0,
        1,
        0,
        1,
        2,
        3,
        2,
        3,
        2,
        3,
    ]
    assert shared_rows(up, 5, 5, config).tolist() == list(range(5))


def test_what_is_folded_multiplies_out_exactly() -> None:
    stored, scales = torch.randn(40).to(torch.bfloat16), torch.rand(40) * 5 + 0.1
    stored[7] = 0
    divided, exact = fold_into(stored, scales)
    assert divided.dtype == torch.bfloat16
    assert torch.allclose(divided.float() * exact, stored.float(), rtol=1e-6)
    assert exact[7] == 1 and torch.allclose(exact, torch.where(stored == 0, 1.0, scales), rtol=0.01)


def test_factors_scale_columns_and_rows() -> None:
    weight = torch.randn(3, 4).to(torch.bfloat16)
    rows, columns = torch.rand(3), torch.rand(4)
    found = Factors(columns, rows).apply(weight)
    assert torch.allclose(found, weight.float() * columns * rows[:, None])
    assert torch.equal(Factors().apply(weight), weight.float())

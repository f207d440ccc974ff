"""Sizes that config.json states."""

from typing import Any

import pytest

from quantkit.model.architectures import EXPERTS_PER_TOKEN, experts_per_token, text_config


@pytest.mark.parametrize("name", EXPERTS_PER_TOKEN)
def test_experts_of_a_token_have_many_names(name: str) -> None:
    assert experts_per_token({name: 3}) == 3
    assert experts_per_token({"model_type": "a", "text_config": {name: 2}, name: 3}) == 2


@pytest.mark.parametrize(
    "config", [{}, {"num_experts_per_tok": None}, {"moe_k": "2"}, {"text_config": None}, {"num_experts": 8}]
)
def test_experts_of_a_token_that_no_config_states(config: dict[str, Any]) -> None:
    assert experts_per_token(config) is None


def test_a_text_config_goes_before_the_rest() -> None:
    config = {"hidden_size": 8, "image_size": 2, "text_config": {"hidden_size": 4}}
    assert text_config(config) == {**config, "hidden_size": 4}
    assert config["hidden_size"] == 8

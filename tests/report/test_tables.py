"""Cells of reports are short and readable."""

import pytest

from quantkit.report.tables import rounded_text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.01234, 3, "0.0123"),
        (118.4, 3, "118"),
        (999.7, 3, "1,000"),
        (1936.0, 3, "1,940"),
        (31640.0, 4, "31,640"),
        (1234.0, 4, "1,234"),
        (0.0, 3, "0"),
    ],
)
def test_large_figures_have_groups_and_no_exponent(value: float, digits: int, text: str) -> None:
    assert rounded_text(value, digits) == text

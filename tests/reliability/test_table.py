"""Every fault has a test, and the page says which."""

from .table import FAULTS, PAGE, ROWS, marked_tests, with_table


def test_all_72_rows_have_a_test_of_the_command_line() -> None:
    assert list(ROWS) == list(range(1, 73)) and sum(map(len, FAULTS.values())) == 72
    tests = marked_tests()
    assert list(tests) == list(ROWS)
    # Only what no command does is shown without one: what becomes of a process that is killed, and tensors.
    here = [number for number, of in tests.items() if any("reliability" in test.file for test in of)]
    assert set(ROWS) - set(here) <= {62}


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == with_table(page), "run `python -m tests.reliability.table`"

"""The numbers of `house_numbers` only shrink: each is compared with its record."""

import json

import pytest
from conftest import HAS_CUDA, INTERPRETED
from house_numbers import CALLS, ITEMS, MEASURES, RECORD, ROOT, SOURCES, items_a_function

SLACK = 0.05
"""The part by which a number may lie below its record."""


def problems(numbers):
    """What is wrong with numbers, by their record."""
    record = json.loads(RECORD.read_text())
    for name, number in numbers.items():
        most = record[name]
        if number > most:
            yield f"{name} grew from {most} to {number}: house_numbers.py {name} lists what counts"
        elif number < most - max(2 * isinstance(most, int), SLACK * most):
            yield f"{name} shrank from {most} to {number}: house_numbers.py --write records that"


def test_what_the_record_says():
    assert not [*problems(json.loads(RECORD.read_text()))]
    most = json.loads(RECORD.read_text())["docstrings"]
    assert "docstrings grew" in next(problems({"docstrings": most + 1}))
    assert not [*problems({"docstrings": most - 2})]
    assert most < 4 or "docstrings shrank" in next(problems({"docstrings": most // 4}))


def test_sources():
    assert not [*problems({name: len(SOURCES[name]()) for name in SOURCES})]


@pytest.mark.skipif(HAS_CUDA or INTERPRETED, reason="what the CPU's operators do")
def test_own_calls():
    assert not [*problems({name: len(MEASURES[name]()) for name in CALLS})]


def test_items(request):
    """Only a run of all tests knows how many items there are."""
    files, items = [*(ROOT / "tests").rglob("test_*.py")], request.session.items
    some = request.config.getoption("markexpr") != "not install and not vllm"
    some |= request.config.getoption("exhaustive")
    if some or len({item.path for item in items}) < 0.9 * len(files):
        pytest.skip("some of the tests run")
    assert not [*problems({ITEMS: items_a_function(item.nodeid for item in items)})]

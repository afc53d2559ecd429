import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algo.statistics import t_quantile, wilson_interval


def test_by_value():
    # Newcombe (1998), Stat. Med. 17, table I: 81 of 263 and 15 of 148.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 2000), st.data())
def test_holds_the_fraction_and_mirrors(num_total, data):
    num_right = data.draw(st.integers(0, num_total))
    low, high = wilson_interval(num_right, num_total)
    assert 0.0 <= low <= num_right / num_total <= high <= 1.0
    assert wilson_interval(num_total - num_right, num_total) == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="num_right 3"):
        wilson_interval(3, 2)


def test_quantiles_of_students_t():
    # Tables: 97.5 %.
    for freedom, value in ((1, 12.7062), (2, 4.3027), (5, 2.5706), (10, 2.2281), (30, 2.0423), (499, 1.9647)):
        assert t_quantile(0.975, freedom) == pytest.approx(value, rel=3e-4)

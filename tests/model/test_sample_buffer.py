"""The bounded sample of tokens, against all tokens in the order of their priorities."""

import pickle

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esm_turbo.model.sample_buffer import SampleBuffer


def tokens_of(numbers):
    """Tokens that say their number in every field: one layer, two heads, vectors of three."""
    numbers = torch.as_tensor(numbers)
    vectors = numbers.float()[:, None, None, None].expand(-1, 1, 2, 3)
    return {
        "keys": vectors.bfloat16(),
        "values": -vectors.bfloat16(),
        "key_weights": vectors[..., 0].clone(),
        "value_weights": 2 * vectors[..., 0],
        "is_special": numbers % 2 == 0,
        "positions": numbers.long(),
    }


@settings(deadline=None)
@given(st.integers(1, 12), st.permutations(range(30)), st.lists(st.integers(0, 30), max_size=4))
def test_the_lowest_priorities_stay_in_their_order(size, priorities, cuts):
    priorities = np.array(priorities, dtype=np.int64)
    buffer = SampleBuffer(size)
    for part in np.split(np.arange(30), sorted(cuts)):
        best = part[buffer.candidates(priorities[part])]
        buffer.add(priorities[best], **tokens_of(best))
    sample = buffer.sample()
    expected = np.argsort(priorities)[:size]
    np.testing.assert_array_equal(sample.positions, expected)
    np.testing.assert_array_equal(sample.is_special, expected % 2 == 0)
    np.testing.assert_array_equal(sample.keys, np.broadcast_to(expected[:, None], (1, 2, len(expected), 3)))
    np.testing.assert_array_equal(sample.values, -sample.keys)
    np.testing.assert_array_equal(sample.value_weights, np.broadcast_to(2 * expected, (1, 2, len(expected))))


def test_a_sample_that_was_taken_does_not_change():
    buffer = SampleBuffer(2)
    buffer.add(np.array([5, 6]), **tokens_of([0, 1]))
    before = buffer.sample()
    buffer.add(np.array([1, 2, 7]), **tokens_of([2, 3, 4]))
    np.testing.assert_array_equal(before.positions, [0, 1])
    np.testing.assert_array_equal(before.keys[0, 0, :, 0], [0, 1])
    again = pickle.loads(pickle.dumps(buffer)).sample()
    np.testing.assert_array_equal(again.positions, [2, 3])
    np.testing.assert_array_equal(buffer.sample().key_weights, again.key_weights)

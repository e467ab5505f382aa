"""State is known by parameter name and follows its tensors into other groupings."""

import torch

from thinwire.core import Layout
from thinwire.core.state import StateStore
from thinwire.methods import TopK


def test_a_state_follows_its_parameters_when_buckets_are_rebuilt() -> None:
    store, method = StateStore(), TopK()
    whole = Layout.of([("a", (2, 3)), ("b", (4,)), ("c", (5,))])
    state = store.take(method, whole)
    state.error[:] = torch.arange(15.0)
    assert store.take(method, whole) is state
    right = store.take(method, Layout.of([("c", (5,)), ("a", (2, 3))]))
    assert right.error.tolist() == [10, 11, 12, 13, 14, 0, 1, 2, 3, 4, 5]
    left = store.take(method, Layout.of([("b", (4,))]))
    assert left.error.tolist() == [6, 7, 8, 9]
    assert set(store.entries()) == {"a", "b", "c"}
    assert store.take(method, whole).error.tolist() == list(range(15))


def test_a_loss_scale_rescales_what_is_remembered() -> None:
    store, method = StateStore(), TopK()
    layout = Layout.of([("a", (4,))])
    store.take(method, layout).error[:] = 3.0
    store.rescale(0.5)
    assert store.take(method, layout).error.tolist() == [1.5] * 4
